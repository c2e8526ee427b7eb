"""Opening a model by its id on the Hugging Face hub: `ORG/NAME@REVISION`.

`huggingface_hub` downloads and caches. The rules around it are here: a revision is always pinned,
nothing is fetched that could run code when it is opened, and every failure says what to do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from openzaya.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

WHOLE = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
"""What a checkpoint needs, and whatever else its manifest may list."""

CONFIG_ONLY = ("config.json",)
"""What describes a checkpoint."""

REFUSED = ["*/*", "*.bin", "*.pt", "*.pth", "*.pkl", "*.py"]
"""Never fetched: pickles and code, and subfolders, which hold other models or formats."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REVISION = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*|refs/[A-Za-z0-9_.+/-]*[A-Za-z0-9_]"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>{_REVISION})?)?")
_LONGEST_ID = 96  # of the hub


def _to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


def local_folder(
    name: str | Path,
    say: Callable[[str], None] = _to_stderr,
    files: tuple[str, ...] = WHOLE,
) -> Path:
    """The folder that a path or a hub id stands for, downloaded if need be.

    What exists locally always wins. A hub id has a pinned revision: `ORG/NAME@REVISION`, where a
    commit is never asked for twice, and of a tag or a branch it is said which commit it was.

    Args:
        name: a path, or a hub id. Text that can be neither is returned as the path it is, for the
            caller to refuse.
        say: told which commit a tag or branch was.
        files: patterns of the files to download, `WHOLE` or `CONFIG_ONLY`.

    Returns:
        The path itself, or the snapshot in the local cache (`HF_HUB_CACHE`).

    Raises:
        UserError: if no revision is given, the hub cannot be reached, does not have or does not
            give out the model, the model has no safetensors, or it cannot be stored.
    """
    if os.path.exists(name):  # unlike Path.exists, False for names that no file system takes
        return Path(name)
    parts = _split(str(name))
    if parts is None:
        return Path(name)
    repo, revision = parts
    if not revision:
        raise UserError(_unpinned(repo))
    return _snapshot(repo, revision, say, files)


def _split(name: str) -> tuple[str, str] | None:
    """Repository and revision ("" if none is given), or None if `name` is no hub id."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name:
        return None
    repo, revision = match["repo"], match["revision"] or ""
    if "--" in repo or repo.endswith(".git") or len(repo) > _LONGEST_ID:
        return None
    pinned = revision.lower()
    return repo, pinned if _COMMIT.fullmatch(pinned) else revision


def _unpinned(repo: str) -> str:
    """Why `repo` alone is not opened, with the commit to pin where the hub tells it."""
    from huggingface_hub.errors import RepositoryNotFoundError

    message = (
        f"there is no file or folder {repo}, and a model on the hub must be pinned to a revision, "
        f"because branches move: give {repo}@REVISION, a commit or a tag"
    )
    if Path(repo).parent.is_dir():  # rather a mistyped path, which is nobody else's business
        return message
    try:
        commit = _ask(repo, "main").sha
    except RepositoryNotFoundError:
        return f"{message}. The hub at {_endpoint()} shows no model {repo}; check the spelling"
    except Exception:  # only a hint is lost
        return message
    return f"{message}. The current commit of main is {commit}: {repo}@{commit}"


def _ask(repo: str, revision: str) -> ModelInfo:
    """What the hub says of a revision, within a time-out, which downloads do not have everywhere.

    Raises:
        Exception: of huggingface_hub or its HTTP client.
    """
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    if not _COMMIT.fullmatch(info.sha or ""):
        raise ValueError("the answer names no commit")
    return info


def _snapshot(repo: str, revision: str, say: Callable[[str], None], files: tuple[str, ...]) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    pinned = _COMMIT.fullmatch(revision) is not None
    if pinned and (folder := _cached(repo, revision, files)):
        return folder
    commit = revision
    try:
        info = _ask(repo, revision)
        if not pinned:
            # Remembers the commit for a start without network, but knows no time-out.
            commit = HfApi().resolve_revision(repo, revision=revision).resolved
    except Exception as error:
        if not _unreachable(error):
            raise _explained(error, repo, revision) from _harmless(error)
        folder = _cached(repo, revision, files, listed=False)
        if folder is None:
            raise _explained(error, repo, revision) from _harmless(error)
        if not pinned:
            say(
                f"the hub cannot be reached; {repo}@{revision} was commit {folder.name} when it "
                f"was last asked. To pin it, give {repo}@{folder.name}"
            )
        return folder
    if not pinned:
        say(f"{repo}@{revision} is commit {commit} now. To pin it, give {repo}@{commit}")
    try:
        _check_files(info, repo, commit, files)
        return Path(
            snapshot_download(
                repo, revision=commit, allow_patterns=list(files), ignore_patterns=REFUSED
            )
        )
    except UserError:
        raise
    except KeyboardInterrupt:
        say(f"stopped the download of {repo}@{revision}; the same command continues it")
        raise
    except Exception as error:
        raise _explained(error, repo, revision, begun=True) from _harmless(error)


def _cached(repo: str, revision: str, files: tuple[str, ...], listed: bool = True) -> Path | None:
    """The snapshot in the cache, without network, or None.

    Args:
        listed: only where the cache knows that the snapshot is complete. Other programs may have
            put single files there; without a network that is still the best there is.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        if listed:
            get_cached_repo_tree(repo, revision=revision)
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=REFUSED,
                local_files_only=True,
            )
        )
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def _check_files(info: ModelInfo, repo: str, commit: str, files: tuple[str, ...]) -> None:
    """Before anything is fetched: are there weights, and is there room for them?"""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = list(filter_repo_objects(sizes, allow_patterns=list(files), ignore_patterns=REFUSED))
    if files == WHOLE and not any(name.endswith(".safetensors") for name in wanted):
        raise UserError(
            f"{repo}@{commit} holds no *.safetensors, and weights in other formats are not opened, "
            "because they can run code: convert them, or take another revision"
        )
    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if sum(sizes[name] for name in wanted) <= free:
        return
    # Some of it may be in the cache already, of another commit too; to know that takes requests.
    plan = snapshot_download(
        repo, revision=commit, allow_patterns=list(files), ignore_patterns=REFUSED, dry_run=True
    )
    missing = sum(file.file_size or 0 for file in plan if file.will_download)
    if missing > free:
        raise UserError(
            f"{repo}@{commit} needs {missing / 1e9:.1f} GB more in {constants.HF_HUB_CACHE}, where "
            f"{free / 1e9:.1f} GB are free: free room, or set HF_HUB_CACHE to a folder that has it"
        )


def _unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer, so that the cache may stand in for it."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # base of all errors of the HTTP client
        OfflineModeIsEnabled,
        RevisionResolutionError,
    )

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    if _bad_token(error):
        return False
    return isinstance(error, (HTTPError, OfflineModeIsEnabled, RevisionResolutionError))


def _explained(error: Exception, repo: str, revision: str, begun: bool = False) -> UserError:
    """What to tell a user; an error of no known kind is raised as it is.

    The text of errors stays out: a server or the HTTP client may put a token into it.

    Args:
        begun: whether the download had begun.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where, hub, cache = f"{repo}@{revision}", _endpoint(), constants.HF_HUB_CACHE
    login = "log in with `hf auth login` or set HF_TOKEN"
    chain = list(_chain(error))
    full = any(
        getattr(link, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "no space left" in str(link).lower()  # as other languages' libraries report it
        for link in chain
    )
    if full:
        return UserError(
            f"no room for {where} in {cache}: free some, or set HF_HUB_CACHE to another folder, "
            "and run the same command again; it continues"
        )
    if _bad_token(error):
        return UserError(
            "the token for the hub holds characters that cannot be sent: set HF_TOKEN again, or "
            "log in again with `hf auth login`"
        )
    answers = [link for link in chain if isinstance(link, HfHubHTTPError)]
    answer = answers[0] if answers else None
    if isinstance(answer, GatedRepoError):
        return UserError(
            f"{where} is gated: ask for access on {hub}/{repo}, then {login} of the account that "
            "has it"
        )
    if isinstance(answer, RepositoryNotFoundError):
        return UserError(
            f"the hub at {hub} shows no model {repo}: check the spelling; if it is private, {login}"
        )
    if isinstance(answer, RevisionNotFoundError):
        return UserError(
            f"{repo} has no revision {revision} on the hub at {hub}: give a commit (all 40 digits) "
            f"or a tag that {hub}/{repo} lists{_current(repo)}"
        )
    if isinstance(answer, DisabledRepoError):
        return UserError(f"{repo} has been disabled on the hub at {hub}: take another model")
    status = answer.response.status_code if answer is not None else 0
    if status in (401, 403):
        return UserError(
            f"the hub at {hub} refuses access to {where} ({status}): {login} anew, with a token "
            "that may read it"
        )
    if any(isinstance(link, OfflineModeIsEnabled) for link in chain):
        return UserError(
            f"{where} is not whole in the cache {cache}, and HF_HUB_OFFLINE or "
            "TRANSFORMERS_OFFLINE forbids a download: unset it"
        )
    reason = f"it answered {status}" if status else _reason(chain)
    if begun and (status or _broken_off(error)):
        return UserError(
            f"the download of {where} from the hub at {hub} was interrupted ({reason}): run the "
            "same command again; it keeps the files that are whole and continues"
        )
    if status or isinstance(error, HTTPError) or _unreachable(error):
        return UserError(
            f"the hub at {hub} cannot be reached ({reason}), and {where} is not in the cache "
            f"{cache}: check the network and HF_ENDPOINT, or give a local folder"
        )
    if isinstance(error, OSError) and error.strerror:
        return UserError(
            f"cannot store {where}: {error.strerror}: {error.filename or cache}; set HF_HUB_CACHE "
            "to a folder that can be written"
        )
    if not begun and isinstance(error, (KeyError, TypeError, ValueError)):
        return UserError(
            f"what answers at {hub} is no hub: check HF_ENDPOINT, and whether the network asks "
            "for a login of its own"
        )
    raise error


def _broken_off(error: Exception) -> bool:
    """Whether a download failed because of the network, and not of this machine."""
    from huggingface_hub.errors import HTTPError

    if isinstance(error, (HTTPError, ConnectionError, TimeoutError, RuntimeError)):
        return True
    # Sizes that differ and missing files are reported so, without a message of the system.
    return isinstance(error, OSError) and not error.strerror


def _current(repo: str) -> str:
    try:
        return f"; the current commit of main is {_ask(repo, 'main').sha}"
    except Exception:  # only a hint is lost
        return ""


def _bad_token(error: BaseException) -> bool:
    # The HTTP client has one error for headers that it cannot encode, one for those it may not.
    return isinstance(error, UnicodeEncodeError) or type(error).__name__ == "LocalProtocolError"


def _harmless(error: Exception) -> Exception | None:
    """The cause to show in tracebacks: none where the text of the error may hold the token."""
    return None if any(_bad_token(link) for link in _chain(error)) else error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(chain: list[BaseException]) -> str:
    """The system's own words (connection refused, name not known), or the kind of error."""
    for link in chain:
        if isinstance(link, TimeoutError):
            return "no answer in time"
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
    return type(chain[-1]).__name__


def _endpoint() -> str:
    """Address of the hub, without a password that may be part of it."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
