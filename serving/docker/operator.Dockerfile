# syntax=docker/dockerfile:1
# The operator, the dashboard and `edl submit`: no torch.
#
#   docker build -f serving/docker/operator.Dockerfile -t REGISTRY/edl/operator:0.2.0 .      in the repository's folder

ARG PYTHON=3.12-slim
FROM python:${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/edl
ENV PATH=/opt/edl/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY edl edl
COPY serving/edl_serving serving/edl_serving
RUN pip install --constraint constraints.txt ".[kubernetes,consul,etcd,dashboard]" && pip uninstall --yes pip

FROM python:${PYTHON}
COPY --from=build /opt/edl /opt/edl
# Numbers, so that Kubernetes can tell that it is not root; HOME is what pods with a read-only file system can write.
USER 65532:65532
ENV PATH=/opt/edl/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /work
ENTRYPOINT ["edl"]
CMD ["operator"]
