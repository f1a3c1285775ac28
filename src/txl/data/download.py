"""Downloads of public files by pooch; only complete, verified files are kept.

A file is downloaded under a temporary name and renamed when its hash is correct. An interrupted transfer is repeated
from the beginning.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from txl.data.benchmarks import Download
from txl.data.progress import DownloadBar, say
from txl.errors import Field, UserError
from txl.files import file_sha256, follow_umask, write_whole

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
    by_hand = ("try again later, or fetch the files yourself and give their folder with ", Field("data.source"))
    raise UserError(f"cannot download: {'; '.join(failures)}", remedy=by_hand)


class _Unavailable(Exception):
    """Error for a file that could not be downloaded from one URL."""


def _fetch_file(file: Download, folder: Path, quiet: bool, timeout: float) -> None:
    """Download one file; if no hash is published, record the hash of the first download beside the file.

    Raises:
        _Unavailable: if the file could not be downloaded.
        OSError: if the file cannot be written.
    """
    import pooch
    from requests.exceptions import ConnectionError, HTTPError, RequestException, Timeout

    name, url = file.file_name, file.url
    path, record = folder / name, folder / f"{name}.sha256"
    known = file.hash or (f"sha256:{record.read_text().strip()}" if record.is_file() else None)
    pooch.get_logger().setLevel("WARNING")  # this module prints what pooch would log at the level "INFO"
    files = pooch.create(folder, base_url="", registry={name: known}, urls={name: url}, retry_if_failed=TRIES - 1)

    tell = functools.cache(say)  # once, not at each try

    def transfer(*to: Any, **options: Any) -> None:
        tell(f"downloading {url}", quiet)
        # Without content encoding, Content-Length is the length of the file, so that a truncated transfer is detected.
        headers = {"Accept-Encoding": "identity", "User-Agent": "transformer-xl"}
        bar: Any = DownloadBar(name, quiet)
        download = pooch.HTTPDownloader(bar, chunk_size=1 << 18, timeout=timeout, headers=headers)
        try:
            download(*to, **options)
        finally:
            bar.close()

    try:
        files.fetch(name, downloader=transfer)
    except HTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise _Unavailable(f"{url} answered {status}") from None
    except Timeout:
        raise _Unavailable(f"{url} did not answer within {timeout:g} seconds, {TRIES} times") from None
    except RequestException as error:
        what = "could not be reached," if isinstance(error, ConnectionError) else "broke off"
        raise _Unavailable(f"{url} {what} {TRIES} times ({_reason(error)})") from None
    except ValueError:  # pooch raises it for a wrong hash
        raise _Unavailable(f"{url} returned a file other than the known one ({known}), {TRIES} times") from None
    follow_umask(path)
    if known is None:
        digest = file_sha256(path)
        write_whole(record, digest + "\n")
        say(f"note: no published hash of {name} is known; recorded sha256 {digest}", quiet)


def forget(folder: Path) -> None:
    """Remove the downloaded files of a folder, so that damaged content is downloaded again."""
    for path in folder.glob("*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    """Return the innermost cause of an error, in one line."""
    inner: BaseException = error
    while getattr(inner, "args", None) and isinstance(inner.args[-1], Exception):
        inner = inner.args[-1]
    inner = getattr(inner, "reason", None) or inner
    text = " ".join(str(inner).split())
    # "HTTPConnection(host='...', port=80): what happened": the caller's message names the address.
    return text.rpartition("): ")[2][:160] or type(error).__name__
