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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from maniple.engines.megatron.checkpoint.index import INDEX, Index, read_index
from maniple.errors import UserError

FORMAT = 2
MANIFEST = "maniple.json"
PARTIAL, REMOVED, REPLACED = ".partial", ".removed", ".replaced"
_PREFIX = "step_"
_TYPES = {"step": int, "samples": int, "updates": int, "world_size": int, "saved": float} | dict.fromkeys(
    ("card", "job", "files", "extra", "versions"), dict
)
_OWN = '"sha256": "'
_NO_DIGEST = "0" * 64
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
    if not (folder / MANIFEST).is_file():
        raise UserError(f"no checkpoint at {folder}: {_what_it_is(folder)}")
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        known = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(folder, f"its {MANIFEST} cannot be read ({error})") from error
    if known != FORMAT:
        raise UserError(
            f"checkpoint {folder} has format {known}, this version reads {FORMAT}: use the one that wrote it"
        )
    own = str(manifest.get("sha256"))
    if hashlib.sha256(text.replace(_OWN + own, _OWN + _NO_DIGEST).encode()).hexdigest() != own:
        raise damaged(folder, f"its {MANIFEST} is not as it was written")
    wrong = [key for key, kind in _TYPES.items() if type(manifest.get(key)) is not kind]
    if wrong:
        raise damaged(folder, f"its {MANIFEST} has no proper {', '.join(wrong)}")
    return manifest


def damaged(folder: Path, why: str) -> UserError:
    return UserError(f"checkpoint {folder} is damaged: {why}; resume from another, or copy it again")


def _what_it_is(folder: Path) -> str:
    """What a folder without a manifest is, as far as its files tell."""
    if not folder.is_dir():
        return "there is no such folder"
    names = set(os.listdir(folder))
    if folder.suffix in (PARTIAL, REMOVED, REPLACED):
        return "it was not written to its end, or was being removed: take another"
    if "checkpoints" in names or any(name.startswith(_PREFIX) for name in names):
        return "it holds checkpoints and is none: name one of them, or take --resume auto"
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "it is a Hugging Face model, which holds weights alone"
    if "latest_checkpointed_iteration.txt" in names or {"metadata.json", INDEX} <= names:
        return f"it is a checkpoint of Megatron-LM, without {MANIFEST}"
    if INDEX in names:
        return f"it is a checkpoint of torch, without {MANIFEST}"
    return f"a checkpoint is a folder that holds {MANIFEST}"


# --- whole or not -----------------------------------------------------------------------------------------------------


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """The cheap part of verifying: every file is there with its size. Raises UserError naming the first that is not."""
    for name, (size, _) in _files(folder, manifest):
        if not (folder / name).is_file():
            raise damaged(folder, f"{name} is missing")
        if (there := (folder / name).stat().st_size) != size:
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
    for name, end in sorted(index.ends.items()):
        if end > sizes.get(name, -1):
            raise damaged(folder, f"its {INDEX} speaks of more of {name} than {MANIFEST} does")
    return index


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
        if os.path.basename(name) != name or name in ("", ".", "..", MANIFEST):
            raise damaged(folder, f"its {MANIFEST} names the file {name!r}, which is not one of its folder")
        try:
            found.append((name, (int(entry["bytes"]), str(entry["sha256"]))))
        except (TypeError, KeyError, ValueError) as error:
            raise damaged(folder, f"its {MANIFEST} has no proper size and digest of {name}") from error
    if INDEX not in manifest["files"]:
        raise damaged(folder, f"its {MANIFEST} does not know {INDEX}")
    return found


# --- the checkpoints of a run -----------------------------------------------------------------------------------------


def all_of(run_dir: Path) -> list[Path]:
    """Every finished checkpoint of a run, damaged ones too, by step."""
    found = (run_dir / "checkpoints").glob(f"{_PREFIX}*")
    return sorted(
        (path for path in found if re.fullmatch(rf"{_PREFIX}\d{{8,}}", path.name)), key=lambda path: path.name
    )


def newest_first(folders: Iterable[Path]) -> tuple[list[tuple[Path, dict[str, Any]]], list[UserError]]:
    """(checkpoints that look whole, the one saved last first, each with its manifest; what is wrong with the others).

    "Last" is the time of saving and not the step: a run that went on from an older checkpoint has left newer steps of
    another past behind.
    """
    whole, wrong = [], []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
            whole.append((folder, manifest))
        except UserError as error:
            wrong.append(error)
    whole.sort(key=lambda found: (found[1]["saved"], found[1]["step"]), reverse=True)
    return whole, wrong


def find(run_dir: Path, wanted: str) -> tuple[list[tuple[Path, dict[str, Any]]], list[UserError]]:
    """The checkpoints that `resume` may mean, best first: one folder, or for `auto` all of this run that look whole,
    and what is wrong with the others. Raises UserError if the one folder is damaged or none."""
    if wanted == "auto":
        return newest_first(all_of(run_dir))
    manifest = read_manifest(Path(wanted))
    check_files(Path(wanted), manifest)
    return [(Path(wanted), manifest)], []


# --- coming and going -------------------------------------------------------------------------------------------------


def clean(run_dir: Path) -> None:
    """Removes what a killed job left: halves, and those on their way out. What was to be replaced and was not comes
    back. For one process, before the run writes."""
    for left in (run_dir / "checkpoints").glob(f"{_PREFIX}*{REPLACED}"):
        if not left.with_suffix("").exists():
            os.rename(left, left.with_suffix(""))
    for suffix in (PARTIAL, REMOVED, REPLACED):
        for left in (run_dir / "checkpoints").glob(f"{_PREFIX}*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)


def publish(partial: Path) -> Path:
    """Gives a folder whose files are all written its final name, in one step of the file system, and returns it."""
    final = partial.with_suffix("")
    sync_folder(partial)
    old = final.with_suffix(REPLACED)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def prune(run_dir: Path, newest: Path, keep: int | None, keep_every: int | None) -> list[Path]:
    """Removes checkpoints beyond the `keep` saved last, but for steps that are multiples of `keep_every`; returns them.

    newest: just written and whole; it stays. A damaged one is left alone, for its owner to look at.
    """
    if keep is None:
        return []
    removed = []
    for folder, manifest in newest_first(all_of(run_dir))[0][keep:]:
        if folder != newest and not (keep_every and manifest["step"] % keep_every == 0):
            gone = folder.with_suffix(REMOVED)
            os.rename(folder, gone)
            shutil.rmtree(gone)
            removed.append(folder)
    return removed


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
