"""Downloads of public files through pooch; only complete, verified files are kept.

A file is downloaded under a temporary name and renamed when its hash is correct. An interrupted transfer is repeated
from the beginning.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from txl.data.catalogue import Download
from txl.data.progress import DownloadBar, say
from txl.errors import UserError
from txl.files import follow_umask, replacing

TRIES = 3
TIMEOUT = 30.0
"""Seconds without received data after which an attempt is given up."""


def fetch(
    routes: tuple[tuple[Download, ...], ...], folder: Path, *, quiet: bool = False, timeout: float = TIMEOUT
) -> Path:
    """Download the files of the first route that works.

    Args:
        routes: alternative sets of files; each set is sufficient by itself.
        folder: directory that keeps the downloaded files. Existing files with the right hash are not downloaded again.
        quiet: True to write no progress to standard error.
        timeout: seconds without received data after which an attempt is given up.

    Returns:
        The folder.

    Raises:
        UserError: if no route works; the message gives the reason for each route.
        OSError: if the files cannot be written.
    """
    failures = []
    for route in routes:
        try:
            for download in route:
                _fetch_file(download, folder, quiet, timeout)
            return folder
        except _Unavailable as error:
            failures.append(str(error))
    raise UserError(
        f"cannot download: {'; '.join(failures)}; try again later, or fetch the files yourself and give their folder "
        f"with --source"
    )


class _Unavailable(Exception):
    """Error for a file that could not be downloaded from one URL."""


def _fetch_file(download: Download, folder: Path, quiet: bool, timeout: float) -> None:
    """Download one file; if no hash is published, record the hash of the first download beside the file.

    Raises:
        _Unavailable: if the file could not be downloaded.
        OSError: if the file cannot be written.
    """
    import requests.exceptions
    from pooch.core import stream_download
    from pooch.downloaders import HTTPDownloader

    path, record = folder / download.file_name, folder / f"{download.file_name}.sha256"
    known = download.hash or (f"sha256:{record.read_text().strip()}" if record.is_file() else None)
    if path.is_file() and known is not None and file_hash(path, known) == known:
        return
    say(f"downloading {download.url}", quiet)
    bar = DownloadBar(download.file_name, quiet)
    # Without content encoding, Content-Length is the length of the file, so that a truncated transfer is detected.
    headers = {"Accept-Encoding": "identity", "User-Agent": "transformer-xl"}
    downloader = HTTPDownloader(progressbar=cast(Any, bar), chunk_size=1 << 18, timeout=timeout, headers=headers)
    try:
        with _silent_pooch():
            stream_download(download.url, path, known, cast(Any, downloader), retry_if_failed=TRIES - 1)
    except requests.exceptions.HTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise _Unavailable(f"{download.url} answered {status}") from None
    except requests.exceptions.Timeout:
        raise _Unavailable(f"{download.url} did not answer within {timeout:g} seconds, {TRIES} times") from None
    except requests.exceptions.ConnectionError as error:
        raise _Unavailable(f"{download.url} could not be reached, {TRIES} times ({_reason(error)})") from None
    except requests.exceptions.RequestException as error:
        raise _Unavailable(f"{download.url} broke off {TRIES} times ({_reason(error)})") from None
    except ValueError:  # pooch raises it for a wrong hash
        raise _Unavailable(
            f"{download.url} returned a file other than the known one ({known}), {TRIES} times"
        ) from None
    finally:
        bar.close()
    follow_umask(path)
    if known is None:
        digest = file_hash(path, "sha256:").removeprefix("sha256:")
        with replacing(record) as temporary:
            temporary.write_text(digest + "\n")
        say(f"note: no published hash of {download.file_name} is known; recorded sha256 {digest}", quiet)


def forget(folder: Path) -> None:
    """Remove the downloaded files of a folder, so that damaged content is downloaded again."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_file():
                path.unlink(missing_ok=True)


def file_hash(path: Path, like: str) -> str:
    """Return the hash of a file as "algorithm:hex", with the algorithm of `like`."""
    algorithm = like.split(":")[0]
    with open(path, "rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def _reason(error: Exception) -> str:
    """Return the innermost cause of an error, in one line."""
    inner: BaseException = error
    while getattr(inner, "args", None) and isinstance(inner.args[-1], Exception):
        inner = inner.args[-1]
    inner = getattr(inner, "reason", None) or inner
    text = " ".join(str(inner).split())
    # "HTTPConnection(host='...', port=80): what happened": the caller's message names the address.
    return text.rpartition("): ")[2][:160] or type(error).__name__


@contextmanager
def _silent_pooch() -> Iterator[None]:
    """Silence pooch's own messages within the `with` block, as this module prints equivalent ones."""
    import pooch

    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
