"""Parser of reports for the tests."""

from __future__ import annotations

from html.parser import HTMLParser

from tests.reporting.fake_run import FakeRun

from txl.reporting.report import write_report

VOID = {"meta", "path", "rect", "use", "line", "br"}


class Page(HTMLParser):
    """Content of a page; parsing fails if tags are not closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.captions, self.prompts, self.controls = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """Visible text, with single spaces instead of line breaks."""
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        names = [tag for tag, _ in self.open]
        if "style" in names or "svg" in names:
            return
        self.words.append(data)
        kind = self.open[-1][1].get("class") if self.open else None
        for name, found in (("prompt", self.prompts), ("control", self.controls)):
            if kind == name:
                found.append(data)
        if names and names[-1] == "caption":
            self.captions.append(data)


def shown(run: FakeRun) -> Page:
    return Page(write_report(run.path).read_text(encoding="utf-8"))
