"""Uploading a folder to Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

from ..progress import say
from .files import CheckpointError


def check_name(name: str) -> None:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        raise CheckpointError(f"--push {name}: need the name of a repository, OWNER/NAME")


def push(folder: Path, name: str) -> None:
    """Upload all files of a folder to the repository, which is made where it is not there yet, and is private then."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by mambakit convert")
    except Exception as error:  # no network, no right to write, no login: the library has many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{folder} is written, but was not uploaded to {name}: {reason}\n"
            f"log in with: hf auth login; and upload it with: hf upload {name} {folder}"
        ) from None
    say(f"uploaded to https://huggingface.co/{name}")
