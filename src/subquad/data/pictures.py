"""Files of pictures: CIFAR-10, MNIST, ImageNet in 64 × 64, the folders of Pathfinder."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from subquad.data.files import Source, members, read_bytes, read_lines

CIFAR10 = Source(
    "cifar10",
    "CIFAR-10, binary version: cifar-10-binary.tar.gz, or of its files test_batch.bin and at least one of "
    "data_batch_1.bin … data_batch_5.bin,",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
MNIST = Source(
    "mnist",
    "MNIST: {train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    "http://yann.lecun.com/exdb/mnist/ or any of its mirrors",
)
IMAGENET64 = Source(
    "imagenet64",
    "downsampled ImageNet 64 × 64 as arrays: train_data_batch_1.npz … _10.npz, val_data.npz (keys data, labels)",
    "the downsampled ImageNet page of Chrabaszcz et al.",
)
RECORD = 1 + 3 * 32 * 32  # a label byte, then the R, G and B planes
LUMA = (0.299, 0.587, 0.114)  # gray of R, G, B (ITU-R 601), as the Arena converts

Pictures = tuple[np.ndarray, np.ndarray]  # values uint8 (N, …), labels int64 (N,)


def pixels(planes: np.ndarray, colour: str) -> np.ndarray:
    """(N, 3, 1024) planes → (N, 1024) gray, or (N, 3072) with R, G, B of a pixel side by side."""
    if colour == "rgb":
        return planes.transpose(0, 2, 1).reshape(len(planes), -1)
    red, green, blue = (weight * planes[:, plane].astype(np.float32) for plane, weight in enumerate(LUMA))
    return np.rint(red + green + blue).astype(np.uint8)


def read_cifar10(data: Path | None, part: str) -> Pictures:
    """All batches of the training part that are there, or the test batch: planes (N, 3, 1024) and labels (N,)."""
    batches = [f"data_batch_{number}.bin" for number in range(1, 6)] if part == "train" else ["test_batch.bin"]
    loose = [CIFAR10.look(data, batch, f"cifar-10-batches-bin/{batch}") for batch in batches]
    found = [(str(path), read_bytes(path)) for path in loose if path is not None]
    if not found:
        archive = CIFAR10.find(data, "cifar-10-binary.tar", batches[0])
        inside = members(archive, lambda name: PurePosixPath(name).name in batches)
        found = [(f"{archive}: {name}", content) for name, content in inside]
    if not found:
        raise ValueError(f"{archive} holds no {' or '.join(batches)}; get it again")
    records = np.concatenate([cifar10_records(name, content) for name, content in found])
    return records[:, 1:].reshape(-1, 3, 1024), records[:, 0].astype(np.int64)


def cifar10_records(name: str, content: bytes) -> np.ndarray:
    """(N, 3073): label, then pixels."""
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{name} has {len(content)} bytes, which is not a multiple of a record of {RECORD}; get it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        raise ValueError(f"{name}, record {wrong[0]}: label {records[wrong[0], 0]} is out of range: 0 to 9")
    return records


def read_mnist(data: Path | None, part: str) -> Pictures:
    stem = "train" if part == "train" else "t10k"
    images, labels = (
        MNIST.find(data, f"{stem}-{kind}-ubyte", f"{stem}-{kind.replace('-', '.')}-ubyte")
        for kind in ("images-idx3", "labels-idx1")
    )
    x, y = read_idx(images, 3), read_idx(labels, 1).astype(np.int64)  # (N, 28, 28), (N,)
    if x.shape[1:] != (28, 28):
        raise ValueError(f"{images} holds pictures of {x.shape[1]}×{x.shape[2]} pixels, not of 28×28")
    if len(x) != len(y):
        raise ValueError(f"{images} holds {len(x)} pictures and {labels} {len(y)} labels")
    wrong = np.flatnonzero(y > 9)
    if len(wrong):
        raise ValueError(f"{labels}, record {wrong[0]}: label {y[wrong[0]]} is out of range: 0 to 9")
    return x.reshape(len(x), -1), y


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of bytes: magic number 0x08 and the number of dimensions, the sizes (big-endian), the values."""
    content = read_bytes(path)
    magic = int.from_bytes(content[:4], "big")
    if len(content) < 4 + 4 * dimensions or magic != 0x0800 + dimensions:
        raise ValueError(f"{path} is not an IDX file of {dimensions} dimensions: its magic number is {magic}, "
                         f"not {0x0800 + dimensions}")  # fmt: skip
    shape = np.frombuffer(content, ">u4", dimensions, 4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if not len(values) or len(values) != np.prod(shape):
        raise ValueError(f"{path} says it holds {'×'.join(map(str, shape))} values and has {len(values)}; get it again")
    return values.reshape(shape)


def planes_file(path: Path) -> np.ndarray:
    """(N, 12288) with R, G, B of a pixel side by side, from an array file of planes."""
    try:
        with np.load(path) as arrays:
            planes = arrays["data"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}; get it again") from error
    if planes.ndim != 2 or planes.shape[1] != 3 * 64 * 64 or planes.dtype != np.uint8:
        raise ValueError(f"{path}: data must be uint8 (N, 12288), not {planes.dtype} {planes.shape}")
    return pixels(planes.reshape(len(planes), 3, -1), "rgb")


def pathfinder_rows(folder: Path) -> list[tuple[Path, str, int]]:
    """(picture file, where it is named, label) of all rows of the metadata, in the order of the files' numbers."""
    files = sorted(folder.glob("metadata/*.npy"), key=lambda file: (len(file.stem), file.stem))
    rows = []
    for file in files:
        for number, line in read_lines(file):
            where, columns = f"{file}, line {number}", line.split()
            if not columns:
                continue
            if len(columns) < 4:
                raise ValueError(f"{where}: {len(columns)} columns, expected folder, file, number, label …")
            if columns[3] not in ("0", "1"):
                raise ValueError(f"{where}: label {columns[3]!r}, expected 0 or 1")
            path = folder / columns[0] / columns[1]
            if not path.is_file():
                raise ValueError(f"{where}: the picture {path} does not exist")
            if path.stat().st_size:
                rows.append((path, where, int(columns[3])))
    if len(rows) < 10:
        raise ValueError(f"{folder} names {len(rows)} pictures in metadata/*.npy; a split needs 10 at least")
    return rows


def read_picture(path: Path, where: str, size: int) -> np.ndarray:
    """The grey values of a PNG, row by row: (size²,) uint8."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(path.read_bytes())) as image:
            pixels = np.asarray(image.convert("L"))
    except (OSError, SyntaxError, UnidentifiedImageError) as error:  # Pillow's word for a broken PNG is SyntaxError
        raise ValueError(f"{where}: the picture {path} cannot be read: {error}; get it again") from error
    if pixels.shape != (size, size):
        raise ValueError(
            f"{where}: the picture {path} has {pixels.shape[1]}×{pixels.shape[0]} pixels, not {size}×{size}"
        )
    return pixels.ravel()
