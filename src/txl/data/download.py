"""Downloads of public files by pooch; only complete, verified files are kept.

A file is downloaded under a temporary name and renamed when its hash is correct. An interrupted transfer is repeated
from the beginning.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from txl.data.benchmarks import Download
from txl.data.progress import progress_bar, say
from txl.errors import Field, UserError
from txl.files import follow_umask

_TRIES = 3
TIMEOUT = 30.0  # seconds without received data after which an attempt is given up


def fetch(
    routes: tuple[tuple[Download, ...], ...], folder: Path, *, quiet: bool = False, timeout: float = TIMEOUT
) -> None:
    """Download the files of the first route that works.

    Files that the folder has already, with the right hash, are not downloaded again. An attempt is given up after
    `timeout` seconds without received data.

    Raises:
        UserError: if no route works; the message gives the reason for each route.
        OSError: if the files cannot be written.
    """
    from requests.exceptions import RequestException

    failures = []
    for route in routes:
        for download in route:
            try:
                _fetch_file(download, folder, quiet, timeout)
            except (RequestException, ValueError) as error:  # pooch raises a ValueError for a wrong hash
                reason = " ".join(str(error).split())[:300]
                failures.append(f"{download.url}, tried {_TRIES} times: {reason or type(error).__name__}")
                break
        else:
            return
    by_hand = ("try again later, or fetch the files yourself and give their folder with ", Field("data.source"))
    raise UserError(f"cannot download: {'; '.join(failures)}", remedy=by_hand)


def _fetch_file(file: Download, folder: Path, quiet: bool, timeout: float) -> None:
    import pooch

    pooch.get_logger().setLevel("WARNING")  # this module prints what pooch would log at the level "INFO"
    name, url = file.file_name, file.url
    files = pooch.create(folder, "", registry={name: file.hash}, urls={name: url}, retry_if_failed=_TRIES - 1)
    tell = functools.cache(say)  # once, not at each try

    def transfer(*to: Any, **options: Any) -> None:
        tell(f"downloading {url}", quiet)
        # Without content encoding, Content-Length is the length of the file, so that a truncated transfer is detected.
        headers = {"Accept-Encoding": "identity", "User-Agent": "transformer-xl"}
        with progress_bar(quiet) as bar:
            task = bar.add_task("download", total=None, name=name, doing="downloading")
            meter: Any = SimpleNamespace(total=0)  # with the interface that pooch uses
            meter.update = lambda done: bar.update(task, advance=done, total=meter.total or None)
            meter.reset = lambda: bar.update(task, completed=0)
            meter.close = bar.stop
            pooch.HTTPDownloader(meter, chunk_size=1 << 18, timeout=timeout, headers=headers)(*to, **options)

    files.fetch(name, downloader=transfer)
    follow_umask(folder / name)
