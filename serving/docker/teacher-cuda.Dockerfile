# syntax=docker/dockerfile:1
# A teacher for NVIDIA GPUs.
#
#   docker build -f serving/docker/teacher-cuda.Dockerfile -t REGISTRY/edl/teacher-cuda:0.2.0 .      in the repository's folder
#
# The model is yours: FROM this image, COPY it to /work, or mount it; then `edl serve model.py:load`.

ARG PYTHON=3.12-slim
FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/edl
ENV PATH=/opt/edl/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
# First, since it is large and changes seldom. The wheels of PyPI bring CUDA's libraries; the driver is the node's.
RUN pip install --constraint constraints.txt torch
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY edl edl
COPY serving/edl_serving serving/edl_serving
RUN pip install --constraint constraints.txt ".[serving,torch,consul,etcd,kubernetes]" && pip uninstall --yes pip

FROM python:${PYTHON}
COPY --from=build /opt/edl /opt/edl
# Numbers, so that Kubernetes can tell that it is not root; HOME is what pods with a read-only file system can write.
USER 65532:65532
ENV PATH=/opt/edl/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["edl"]
CMD ["serve", "--help"]
