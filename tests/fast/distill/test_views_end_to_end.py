"""Labels of augmented views are kept, and are those of just the pixels that come with them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from edl.distill import Options  # noqa: E402
from edl.distill.cache import SoftLabelCache, load_labels  # noqa: E402
from edl.distill.torch import distill  # noqa: E402
from edl.distill.views import AugmentedViews, view_id  # noqa: E402
from tests.fast.distill.conftest import Serve  # noqa: E402

SAMPLES, VIEWS = 40, 3


class Crops(Dataset[Any]):
    """Random crops and flips of images."""

    def __init__(self) -> None:
        self.images = torch.rand(SAMPLES, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        top, left = (int(torch.randint(7, ())) for _ in range(2))
        crop = self.images[index, top : top + 2, left : left + 2]
        return (crop.flip(1) if torch.rand(()) < 0.5 else crop).flatten().contiguous(), index


def test_kept_labels_are_of_these_pixels(serve: Serve, tmp_path: Path) -> None:
    """The teacher returns the pixels it sees; once all views were seen it is gone, and other workers make them."""
    teacher = serve("echo", version="r1")
    data = AugmentedViews(Crops(), views=VIEWS)
    cache = SoftLabelCache(path=tmp_path / "labels")
    settings: dict[str, Any] = {"inputs": {"x": 0}, "outputs": "y", "cache": cache, "ids": -1, "dataset": "crops-1"}
    options = Options(teacher_timeout_s=60)
    crops: set[Any] = set()
    for workers, persistent in ((2, True), (0, False)):
        loader = DataLoader(data, batch_size=7, shuffle=True, num_workers=workers, persistent_workers=persistent)
        teachers = teacher.endpoint if workers else None
        with distill(loader, teachers, **settings, options=options) as labelled:
            for epoch in range(2 * VIEWS):
                data.set_epoch(epoch)
                ids = []
                for (pixels, numbers, views), labels in labelled:
                    assert labels.tolist() == pixels.tolist()
                    assert views.tolist() == [view_id(int(number), epoch % VIEWS) for number in numbers]
                    ids += numbers.tolist()
                    crops.update(map(tuple, pixels.tolist()))
                assert sorted(ids) == list(range(SAMPLES))
            stats = labelled.stats()
            assert stats.rows_asked == (SAMPLES * VIEWS if workers else 0)
        teacher.close()
        if workers:
            loader._iterator._shutdown_workers()
    assert len(crops) > 2 * SAMPLES, "views of a sample differ"
    cache.close()
    found = load_labels(tmp_path / "labels").rows([view_id(5, view) for view in range(VIEWS)])["y"]
    for view in range(VIEWS):
        data.set_epoch(view)
        assert found[view].tolist() == data[5][0].tolist()
