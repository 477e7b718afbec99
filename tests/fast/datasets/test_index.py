"""Indexes come over the network: garbage is an error of EDL's, also where its checksum is right."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from edl.datasets import ShardSettings, load_dataset, open_dataset
from edl.datasets import index as index_module
from edl.errors import EDLError
from edl.protocol.master import DatasetSpec
from tests.fast.datasets.leases import Lease

JSON = [None, 5, "x", [], {}, [1], ["/nowhere"], -1, True]


@pytest.mark.parametrize("kind", ["lines", "csv", "parquet", "files", "follow", "follow-files"])
def test_hostile_index(tmp_path: Path, kind: str) -> None:
    """Whatever is in an index with a right checksum: samples, or an error of EDL's, and nothing else."""
    draw = random.Random(kind)
    spec = _spec(tmp_path, kind)
    plain = zlib.decompress(spec.index[index_module._HEAD.size :])
    for _ in range(60):
        hostile = DatasetSpec()
        hostile.CopyFrom(spec)
        body = zlib.compress(_spoil(plain, draw))
        hostile.index = index_module._HEAD.pack(index_module._MAGIC, len(body), zlib.crc32(body)) + body
        with contextlib.suppress(EDLError):
            dataset = load_dataset(hostile)
            for shard in range(3):
                lease = Lease(0, shard, 20 * shard, 20 * shard + 20)
                if dataset.covers(lease):
                    assert len(list(dataset.read(lease))) == len(dataset.sample_ids(lease)) == 20


def _spec(folder: Path, kind: str) -> DatasetSpec:
    (folder / "a.txt").write_text("".join(f"{number}\n" for number in range(100)))
    (folder / "a.csv").write_text("a,b\n" + "".join(f'{number},"x"\n' for number in range(100)))
    locations = {
        "lines": "lines:{}/a.txt",
        "csv": "csv:{}/a.csv",
        "parquet": "parquet:{}/a.parquet",
        "files": "files:{}",
        "follow": "follow:{}/a.txt",
        "follow-files": "follow:{}/",
    }
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        parquet.write_table(pyarrow.table({"id": list(range(100))}), folder / "a.parquet", row_group_size=25)
    return open_dataset(locations[kind].format(folder), ShardSettings(shard_size=20)).spec


def _spoil(plain: bytes, draw: random.Random) -> bytes:
    spoilt = bytearray(plain)
    chance = draw.random()
    if chance < 0.4:
        for _ in range(draw.randint(1, 3)):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
    elif chance < 0.5:
        del spoilt[draw.randrange(len(spoilt)) :]
    else:
        (length,) = struct.unpack_from("<I", plain)
        head, shapes = json.loads(plain[4 : 4 + length])
        target: dict[str, Any] = head["options"] if draw.random() < 0.4 and "options" in head else head
        target[draw.choice(list(target))] = draw.choice(JSON)
        text = json.dumps([head, shapes]).encode()
        spoilt = bytearray(struct.pack("<I", len(text)) + text + plain[4 + length :])
    return bytes(spoilt)
