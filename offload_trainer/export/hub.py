"""Push an exported model to a repository of the Hugging Face hub.

A repository is opened before the export, which may take long, so that a missing login or right is reported first. The
address and the login are huggingface_hub's: HF_ENDPOINT, HF_TOKEN, or what `hf auth login` has stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload_trainer.errors import TrainerError, UserError


class HubRepository:
    """A model repository on the hub, which is created, private, if it does not exist."""

    def __init__(self, name: str) -> None:
        """Create or find the repository `name`, such as "user/model".

        Raises:
            UserError: the name is malformed, there is no login, the account may not write there, or the hub cannot
                be reached.
        """
        from huggingface_hub import HfApi

        self._api: Any = HfApi()
        try:
            self.name = str(self._api.create_repo(name, private=True, exist_ok=True).repo_id)
        except Exception as error:  # huggingface_hub and its HTTP library raise many kinds
            raise UserError(
                f"--push-to-hub {name}: {_first_line(error)}. Nothing was written. Give USER/NAME, and log in with "
                "`hf auth login` or HF_TOKEN, as a user who may write there"
            ) from error

    def push(self, exported: Path, *, message: str) -> str:
        """Upload a directory as one commit; return the commit's address.

        Raises:
            TrainerError: the upload failed; the export is complete.
        """
        try:
            done = self._api.upload_folder(
                repo_id=self.name, folder_path=exported, commit_message=message, repo_type="model"
            )
        except Exception as error:
            raise TrainerError(
                f"{exported} is complete, but was not pushed to {self.name}: {_first_line(error)}. Push it with "
                f"`hf upload {self.name} {exported}`"
            ) from error
        return str(done.commit_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
