"""Upload a folder to the Hugging Face hub (or HF_ENDPOINT), with the token of `hf auth login` or HF_TOKEN."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from assay.types import UserError, describe_error

DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)  # 404: a private repository of others


class HubRepository:
    """A model repository that exists and may be written to. A missing one is created."""

    def __init__(self, name: str, private: bool) -> None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise UserError(f"--push {name}: give OWNER/NAME, e.g. my-user/my-model")
        from huggingface_hub import HfApi, get_token

        self.name = name
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        with one_line_errors(self):
            if get_token() is None:
                raise UserError("--push needs a token of the Hugging Face hub: run hf auth login, or set HF_TOKEN")
            self.api.create_repo(name, private=private or None, exist_ok=True)

    def upload(self, folder: Path, replaced: tuple[str, ...]) -> str:
        """Add the files of the folder in one commit, and return its address.

        `replaced`: patterns of files in the repository that the new ones replace, such as shards of older weights.
        """
        with one_line_errors(self):
            done = self.api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message="Upload from assay export",
                delete_patterns=list(replaced),
            )
        return str(done.commit_url)


@contextmanager
def one_line_errors(repository: HubRepository) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    name, endpoint = repository.name, repository.api.endpoint
    try:
        yield
    except UserError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in DENIED:
            reason = f"the token may not write to {name}: check the name, and that the token has the role write"
        else:
            reason = f"{endpoint} refused {name} (HTTP {status}, {error.server_message or 'no reason given'})"
        raise UserError(f"--push: {reason}") from error
    except Exception as error:  # network errors have the classes of the library's HTTP client, which changes
        advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        raise UserError(
            f"--push: {name} cannot be written at {endpoint} ({describe_error(error)}): {advice}"
        ) from error
