"""Checkpoints as folders of files: what is there, whether it is whole, which one is newest, which may go. No torch.

`RUN/checkpoints/step_00000100/` is one checkpoint: tensors in Megatron-Core's distributed format, and `maniple.json`,
which says what they are and holds a SHA-256 of every other file and, as its last word, of itself. A folder being
written is called `.partial`, one on its way out `.removed` or `.replaced`; none of these is ever read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maniple.engines.megatron.checkpoint import manifest as manifest_schema
from maniple.engines.megatron.checkpoint.index import INDEX, Index, read_index
from maniple.errors import UserError

FORMAT = 2
MANIFEST = "maniple.json"
BACKEND = "metadata.json"  # Megatron-Core's, which names its format
PARTIAL, REMOVED, REPLACED = ".partial", ".removed", ".replaced"
_PREFIX = "step_"
_OWN = '"sha256": "'
_NO_DIGEST = "0" * 64
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_BLOCK = 1 << 22  # bytes read at a time


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"{_PREFIX}{step:08d}"


# --- the manifest -----------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes and syncs `maniple.json`; its last key is the digest of the text with zeros in the digest's place."""
    text = json.dumps({**manifest, "sha256": _NO_DIGEST}, indent=1) + "\n"
    text = text.replace(_OWN + _NO_DIGEST, _OWN + hashlib.sha256(text.encode()).hexdigest())
    with open(folder / MANIFEST, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checkpoint's description. Raises UserError if it is damaged, of another format or no checkpoint at all."""
    if not has(folder, MANIFEST):
        raise UserError(f"no checkpoint at {folder}: {_what_it_is(folder)}")
    try:
        with open(folder / MANIFEST, "rb") as file:
            raw = file.read(manifest_schema.LARGEST + 1)
        if len(raw) > manifest_schema.LARGEST:
            raise ValueError(f"it is larger than {manifest_schema.LARGEST >> 20} MiB")
        text = raw.decode()
        manifest = manifest_schema.parse(text)
        known = manifest["format"]
    except OSError as error:
        raise unreadable(folder / MANIFEST, error) from error
    except (ValueError, KeyError) as error:
        raise damaged(folder, f"its {MANIFEST} cannot be read ({error})") from error
    if known != FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {str(known)[:20]}, this version reads {FORMAT}: use the one that wrote it"
        )
    own = str(manifest.get("sha256"))
    if hashlib.sha256(text.replace(_OWN + own, _OWN + _NO_DIGEST).encode()).hexdigest() != own:
        raise damaged(folder, f"its {MANIFEST} is not as it was written")
    if wrong := manifest_schema.faults(manifest):
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise damaged(folder, f"its {MANIFEST} has no proper {', '.join(name[:80] for name in wrong[:5])}{more}")
    return manifest


def has(folder: Path, name: str) -> bool:
    """Whether a folder has a file of that name. Raises UserError if the system does not let one look."""
    try:
        return (folder / name).is_file()
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror or error}; mend its name or permissions")


def damaged(folder: Path, why: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {why}; resume from another, or copy it again")


def _what_it_is(folder: Path) -> str:
    """What a folder without a manifest is, as far as its files tell."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    if folder.suffix in (PARTIAL, REMOVED, REPLACED):
        return "it was not written to its end, or was being removed: take another"
    if "checkpoints" in names or any(name.startswith(_PREFIX) for name in names):
        newest, _ = newest_first(all_of(folder) or all_in(folder))
        return f"it holds checkpoints and is none: {f'take its newest, {newest[0][0]}' if newest else 'none is whole'}"
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "it is a Hugging Face model: make a checkpoint of it with maniple convert from-hf"
    if "latest_checkpointed_iteration.txt" in names or {BACKEND, INDEX} <= names:
        return f"it is a checkpoint of Megatron-LM, without {MANIFEST}"
    if INDEX in names:
        return f"it is a checkpoint of torch, without {MANIFEST}"
    return f"a checkpoint is a folder that holds {MANIFEST}"


# --- whole or not -----------------------------------------------------------------------------------------------------


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """The cheap part of verifying: every file is there with its size. Raises UserError naming the first that is not."""
    for name, (size, _) in _files(folder, manifest):
        if not has(folder, name):
            raise damaged(folder, f"{name} is missing")
        try:
            there = (folder / name).stat().st_size
        except OSError as error:
            raise unreadable(folder / name, error) from error
        if there != size:
            raise damaged(folder, f"{name} is {'cut short' if there < size else 'too long'}")


def check_digests(
    folder: Path, manifest: dict[str, Any], share: slice = slice(None), progress: Callable[[int], None] | None = None
) -> None:
    """Reads a share of the files, largest first, and compares digests. Raises UserError naming the first that differs.

    progress: called with the number of bytes just read.
    """
    for name, (_, digest) in sorted(_files(folder, manifest), key=lambda file: (-file[1][0], file[0]))[share]:
        try:
            same = file_digest(folder / name, progress) == digest
        except OSError as error:
            raise damaged(folder, f"{name} cannot be read ({error.strerror})") from error
        if not same:
            raise damaged(folder, f"{name} is not as it was written")


def check_index(folder: Path, manifest: dict[str, Any]) -> Index:
    """The checkpoint's index, whose every byte lies in its files. Raises UserError if it is damaged or does not fit."""
    try:
        index = read_index(folder)
    except ValueError as error:
        raise damaged(folder, f"its {INDEX} cannot be read ({error})") from error
    sizes = {name: size for name, (size, _) in _files(folder, manifest)}
    if BACKEND in sizes:
        _check_backend(folder)
    for name, end in sorted(index.ends.items()):
        if end > sizes.get(name, -1):
            raise damaged(folder, f"its {INDEX} speaks of more of {name} than {MANIFEST} does")
    return index


def _check_backend(folder: Path) -> None:
    try:
        with open(folder / BACKEND, "rb") as file:
            found = manifest_schema.parse(file.read(1 << 16).decode())
    except OSError as error:
        raise unreadable(folder / BACKEND, error) from error
    except ValueError as error:
        raise damaged(folder, f"its {BACKEND} cannot be read ({error})") from error
    if found.get("sharded_backend") != "torch_dist":
        raise damaged(folder, f"its {BACKEND} is not of the format torch_dist")


def file_digest(path: Path, progress: Callable[[int], None] | None = None) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            if progress:
                progress(count)
    return digest.hexdigest()


def _files(folder: Path, manifest: dict[str, Any]) -> list[tuple[str, tuple[int, str]]]:
    found = []
    for name, entry in sorted(manifest["files"].items()):
        if not _FILE_NAME.fullmatch(name) or name in (".", "..", MANIFEST):
            raise damaged(folder, f"its {MANIFEST} names the file {name[:80]!a}, which is not one of its folder")
        found.append((name, (entry["bytes"], entry["sha256"])))
    if INDEX not in manifest["files"]:
        raise damaged(folder, f"its {MANIFEST} does not know {INDEX}")
    return found


# --- the checkpoints of a run -----------------------------------------------------------------------------------------


def all_of(run_dir: Path) -> list[Path]:
    """Every finished checkpoint of a run, damaged ones too, by step. Raises UserError if one may not look."""
    return all_in(run_dir / "checkpoints")


def all_in(folder: Path) -> list[Path]:
    """As `all_of`, for the folder that holds them."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error) from error
    return [folder / name for name in sorted(names) if re.fullmatch(rf"{_PREFIX}[0-9]{{8,18}}", name)]


def newest_first(folders: Iterable[Path]) -> tuple[list[tuple[Path, dict[str, Any]]], list[UserError]]:
    """(checkpoints that look whole, the one saved last first, each with its manifest; what is wrong with the others).

    "Last" is by the number that each is given when it is written, and not by step: a run that went on from an older
    checkpoint has left newer steps of another past behind. Nor by time: clocks are set back. Checkpoints without a
    number, of earlier versions, come after those with one, by time.
    """
    whole, wrong = [], []
    for folder in folders:
        try:
            whole.append((folder, read_whole(folder)))
        except UserError as error:
            wrong.append(error)
    whole.sort(key=lambda found: (_number(found[1]), found[1]["saved"], found[1]["step"]), reverse=True)
    return whole, wrong


def _number(manifest: dict[str, Any]) -> int:
    return manifest.get("sequence") or 0


def next_number(run_dir: Path) -> int:
    """One more than the largest of the run's checkpoints, damaged ones whose manifest can be read among them."""
    numbers = [0]
    for folder in all_of(run_dir):
        with suppress(UserError, OSError):
            numbers.append(_number(read_manifest(folder)))
    return 1 + max(numbers)


@dataclass(frozen=True)
class Origin:
    """What a run's checkpoints are known by: `job_id` is one start of a job with its restarts, `lineage` that and those
    it went on from in the same run. Empty for what was written without."""

    job_id: str = ""
    lineage: str = ""

    @staticmethod
    def of_a_start(run_dir: Path, resumed: Path | None) -> Origin:
        """Of a job that begins now, from the checkpoint `resumed` if there is one."""
        fresh = uuid.uuid4().hex
        if resumed is not None and resumed.resolve().parent == (run_dir / "checkpoints").resolve():
            return Origin(fresh, read_manifest(resumed).get("lineage") or "")
        return Origin(fresh, fresh)


def find(run_dir: Path, wanted: str) -> tuple[list[tuple[Path, dict[str, Any]]], list[UserError]]:
    """The checkpoints that `resume` may mean, best first: one folder, or for `auto` all of this run that look whole,
    and what is wrong with the others. Raises UserError if the one folder is damaged, has weights alone, or is none."""
    if wanted == "auto":
        return newest_first(all_of(run_dir))
    manifest = read_whole(Path(wanted))
    refuse_weights_alone(Path(wanted), manifest)
    return [(Path(wanted), manifest)], []


def read_whole(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there. Raises UserError."""
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def refuse_weights_alone(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError unless a run can go on from the checkpoint: one of weights alone begins a run."""
    if holds_weights_alone(manifest):
        raise weights_alone(folder)


def weights_alone(folder: Path) -> UserError:
    return UserError(
        f"checkpoint {folder} holds weights alone, which no run goes on from: to begin one with them set "
        f"checkpoint.init_from={folder}"
    )


def holds_weights_alone(manifest: dict[str, Any]) -> bool:
    return manifest.get("holds") == "weights"


# --- coming and going -------------------------------------------------------------------------------------------------


def clean(run_dir: Path) -> None:
    """Removes what a killed job left: halves, and those on their way out. What was to be replaced and was not comes
    back. For one process, before the run writes."""
    for left in (run_dir / "checkpoints").glob(f"{_PREFIX}*{REPLACED}"):
        if not left.with_suffix("").exists():
            os.rename(left, left.with_suffix(""))
    for suffix in (PARTIAL, REMOVED, REPLACED):
        for left in (run_dir / "checkpoints").glob(f"{_PREFIX}*{suffix}"):
            with suppress(OSError):
                _remove(left)


def publish(partial: Path) -> Path:
    """Gives a folder whose files are all written its final name, in one step of the file system, and returns it."""
    final = partial.with_suffix("")
    sync_folder(partial)
    old = final.with_suffix(REPLACED)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    sync_folder(final.parent)
    with suppress(OSError):
        _remove(old)
    return final


def _remove(path: Path) -> None:
    """A folder with all that is in it, a file, or a link and not what it leads to. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prune(run_dir: Path, newest: Path, keep: int | None, keep_every: int | None) -> list[Path]:
    """Removes checkpoints beyond the `keep` saved last, but for steps that are multiples of `keep_every`; returns them.

    newest: just written and whole; it stays. Those of another lineage are not counted and stay, and so does a damaged
    one, for its owner to look at.
    """
    if keep is None:
        return []
    removed = []
    own, _ = by_lineage(run_dir, read_manifest(newest).get("lineage") or "")
    for folder, manifest in own[keep:]:
        if folder != newest and not (keep_every and manifest["step"] % keep_every == 0):
            gone = folder.with_suffix(REMOVED)
            os.rename(folder, gone)
            _remove(gone)
            removed.append(folder)
    return removed


def by_lineage(
    run_dir: Path, lineage: str
) -> tuple[list[tuple[Path, dict[str, Any]]], list[tuple[Path, dict[str, Any]]]]:
    """The run's checkpoints that look whole, the one saved last first: those of the lineage, and the others."""
    whole, _ = newest_first(all_of(run_dir))
    own = [found for found in whole if (found[1].get("lineage") or "") == lineage]
    return own, [found for found in whole if (found[1].get("lineage") or "") != lineage]


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
