import json
import random
import re
from contextlib import suppress

import pytest
from tests.reporting.fake_run import CACHE, MEASURED, PARTS, FakeRun, begun, evaluation, whole_run
from tests.reporting.html_page import Page, shown

import txl.runs.directory
from txl.errors import UserError
from txl.reporting import report
from txl.reporting.findings import findings
from txl.reporting.plots import Plot
from txl.reporting.report import write_report


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> FakeRun:
    return whole_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def html(whole) -> str:
    return write_report(whole.path).read_text(encoding="utf-8")


def test_it_is_written_into_the_run_directory_or_where_it_is_asked_for(whole, tmp_path):
    assert write_report(whole.path) == whole.path / "report.html"
    out = tmp_path / "elsewhere.html"
    assert write_report(str(whole.path), out=str(out)) == out
    assert out.read_bytes() == (whole.path / "report.html").read_bytes()  # writing a report again gives the same bytes


def test_nothing_is_loaded_from_anywhere(html):
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base"} == set()
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith("#"), (tag, value)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "default-src 'none'" in html
    addresses = set(re.findall(r"https?://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # XML names


def test_it_is_accessible(html):
    page = Page(html)
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    assert tags.count("table") == tags.count("caption") == len(page.captions) > 6
    assert tags.count("figcaption") == tags.count("figure")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if tag == "svg":
            assert "aria-label" in attributes or attributes["aria-hidden"] == "true"
        if tag == "th":
            assert attributes["scope"] in ("col", "row")


def test_the_result_is_the_log_s_and_every_part_is_there_in_order(whole, html):
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Result on the test split", "Training", "Quality against memory length", "Samples", "Corpus",
        "Model and configuration", "Hardware, software, commands",
    ]  # fmt: skip
    rows = next(event for event in whole.directory.events() if event["event"] == "sweep")["rows"]
    text = Page(html).text
    without, result = rows[0], rows[-1]
    assert f"{result['bpc']:.3f} bits per byte, memory 256 {without['bpc']:.3f} bits per byte, without memory" in text
    assert f"{1 - result['nll'] / without['nll']:.1%} fewer bits with memory" in text
    for row in rows:
        assert f"{row['bpc']:.4f} {row['ppl']:.3f} {row['bits_per_byte']:.4f} {row['nll']:.4f} 32,020" in text
    zlib, bz2, lzma = (640_413 * share // 1000 for share in (264, 241, 221))
    bits = [f"{8 * size / 640_413:.3f}" for size in (lzma, bz2, zlib)]
    assert f"lzma (xz -9e) {bits[0]} bzip2 (level 9) {bits[1]} zlib (level 9) {bits[2]}" in text
    made = f"zlib makes {zlib:,} bytes of them, bzip2 {bz2:,}, lzma {lzma:,}"
    assert f"the same 640,413 bytes and nothing else: {made}" in text


def test_every_number_says_under_which_settings_it_was_measured(html):
    text = Page(html).text
    assert (
        "Measured on the test split of stdlib; 640,400 targets, each scored once (12 not scored: first token of each "
        "lane, and remainder); memory 256, window 256 keys (a token’s own included); segments of 128 in 10 lanes; "
        "checkpoint step-00004000."
    ) in text
    assert "Validation: 49,990 targets of the valid split, segments of 128, memory 128, no window." in text
    assert "With memory M, a token sees exactly M keys, its own included. With memory 0, each segment" in text


def test_settings_that_are_not_the_usual_ones_are_said(tmp_path):
    run = begun(tmp_path / "run")
    odd = {"clamp_len": 40, "dtype": "bfloat16", "window": None, "tokens": 990, "dropped": 9, "segment": 17}
    for mem_len in (0, 256):
        run.log("eval", 100, **evaluation(1.5, mem_len, **odd))
    run.compression(1000, 300, 310)
    run.sample("It was", " the river", window=None)
    text = shown(run).text
    assert "the first 1,000 of the 640,413 tokens of the test split of stdlib; 990 targets" in text
    assert "no window; segments of 17 in 10 lanes; distances clamped at 40; computed in bfloat16" in text
    assert "memory 256, window none, at most 400 tokens" in text
    run.sweep(window=None)
    assert "sees exactly M keys" not in shown(run).text


def test_the_result_is_that_of_the_whole_split_and_keeps_its_curve(tmp_path):
    run = begun(tmp_path / "run")
    run.sweep()
    before = findings(run.directory.events())
    for changes in ({"tokens": 299}, {"batch_size": 1}, {"segment": 16}, {"dtype": "bfloat16"}):
        run.log("eval", run.steps, **evaluation(1.0, 256, corpus="stdlib") | changes)
    run.sweep(corpus="other.txt")
    after = findings(run.directory.events())
    assert before is not None
    assert after is not None
    assert after.result == before.result
    assert after.curve == before.curve != []


def test_samples_are_shown_as_they_are_and_do_no_harm(html):
    page = Page(html)
    assert page.prompts == ["def read_config(path):\n    ", "class Stream:\n    ", "import "]
    assert 'Write <b>bold</b> & "quoted" text.\n\n\tReturns:' in "".join(page.words)
    assert page.controls == [r"\x1b", r"\x07", *[r"\u202e", r"\u202c"] * 3]
    assert not set("\x1b\x07\u202e\u202c") & set(html)
    settings = "memory 256, window 256, at most 400 tokens"
    assert f"temperature 0.8, top-k 40, seed 1, {settings}" in page.text
    assert "temperature 1, top-k 40, top-p 0.95, no seed" in page.text
    assert f"greedy, {settings}" in page.text


def test_no_text_of_the_users_becomes_markup(tmp_path):
    evil = "</title></style></pre><script>alert('x')</script>\"'&\x00\udcff`$title"
    run = FakeRun(tmp_path / "run", corpus=evil, options={"train.steps": "100"})
    run.config.name = evil
    run.directory.write_config(run.config)
    run.start()
    run.train(valid_every=50)
    run.sweep(checkpoint=evil)
    run.sample(evil, evil, checkpoint=evil)
    run.log("stop", 100, reason=evil)
    run.log("eval", 100, **evaluation(1.0, 256, corpus=evil, split="valid"))
    run.start("resume", step=100, command=[evil, evil])
    text = write_report(run.path).read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x00" not in text
    assert text.count("</title>") == 1
    escaped = evil.replace("\x00", r"\x00").replace("\udcff", r"\udcff")
    assert Page(text).text.count(escaped) >= 8  # name, corpus, checkpoint, prompt, text, ...


def test_how_a_run_ended_is_said(tmp_path, html):
    assert not re.search("diverged|not finished", Page(html).text)
    run = FakeRun(tmp_path / "run")
    run.start()
    run.train(last=1230)
    unfinished = "This run is not finished: step 1,230 of 4,000. The same txl train command"
    assert f"{unfinished} begins again, as there is no checkpoint." in shown(run).text
    (run.directory.checkpoints / "step-00001000").mkdir(parents=True)
    assert f"{unfinished} goes on from the last checkpoint." in shown(run).text
    run.start("resume", step=1230)
    text = shown(run).text
    assert "Training was run 2 times" in text
    assert text.count("txl train stdlib-tiny") == 2
    run.log("stop", 1230, reason="SIGINT")
    assert "step 1,230 of 4,000, stopped at step 1,230 (SIGINT)." in shown(run).text
    run.log("end", 1230, elapsed=9.0, converged=True)
    text = shown(run).text
    assert "Training ended before step 4,000, because the validation loss no longer improved." in text
    assert "not finished" not in text
    run.log("end", 4000, elapsed=9.0, diverged="the last loss is nan nats")
    assert "Training diverged, and this model is of no use: the last loss is nan nats." in shown(run).text


def test_tokens_without_a_loss_and_a_machine_of_unknown_memory(tmp_path):
    run = FakeRun(tmp_path / "run")
    run.start()
    run.train(10, 10)
    log = run.path / "log.jsonl"
    text = log.read_text().replace('"tokens": 20480', '"tokens": 11274210')
    text = text.replace('"tokens_read": 20480', '"tokens_read": 22548420')
    log.write_text(text.replace(f'"memory_bytes": {8 * 2**30}', '"memory_bytes": null'))
    text = shown(run).text
    assert "22,548,420 tokens (11,274,210 of them counted in the loss), 2 times the training split" in text
    assert "memory unknown" in text


def test_parts_that_are_missing_name_the_command_that_adds_them(tmp_path):
    run = begun(tmp_path / "my run", **{"train.eval_every": "0"})
    text = shown(run).text
    assert f"Not tested yet: txl eval '{run.path}' --mem-lens 0,256 adds it." in text
    assert f"Not measured yet: txl eval '{run.path}' --mem-lens 0,128,256 adds it." in text
    assert f"None in this run’s log; txl generate '{run.path}' --prompt TEXT adds one." in text
    without = {"model.mem_len": "0", "eval.mem_len": "0", "eval.window": "none"}
    assert "Not measured yet" not in shown(begun(tmp_path / "no memory", **without)).text
    run.log("eval", 100, **evaluation(1.5, 256, bytes_per_token=None, bits_per_byte=None))
    text = shown(run).text
    assert f"Not measured without memory: txl eval '{run.path}' --mem-lens 0,256 adds it." in text
    assert "zlib, bzip2 and lzma are not shown: the size of the text that was scored is not known." in text


def test_other_evaluations_are_listed_with_how_they_were_made(tmp_path):
    run = begun(tmp_path / "run")
    run.log("eval", 100, **evaluation(1.5, 256))
    for number in range(10):
        row = evaluation(2.0, 256, split="valid", tokens=61_200 + number, dropped=9, checkpoint="step-00000050")
        run.log("eval", 50, **row)
    run.log("eval", 100, **evaluation(1.4, 256, batch_size=1, **CACHE))
    run.log("eval", 100, **evaluation(1.3, 256, temperature=1.5))
    run.log("eval", 100, **evaluation(1.2, 0, sliding=True, exhaustive=True, segment=20, dtype="bfloat16"))
    run.log("eval", 100, **evaluation(1.1, 256, exhaustive=True, clamp_len=40))
    text = shown(run).text
    assert "2.164 bits per byte, memory 256 Measured on" in text  # 1.5 nats
    assert "128 in 1 lane, continuous cache of 2,000 tokens (theta 0.6, lambda 0.05) 1.4000 2.020 bpc" in text
    assert "128 in 10 lanes, temperature 1.5 1.3000 1.876 bpc" in text
    assert "4000 640,400 sliding window of 20 tokens, computed in bfloat16 1.2000 1.731 bpc" in text
    assert "128 in 10 lanes, exhaustive, distances clamped at 40 1.1000 1.587 bpc" in text
    how = "memory 256, window 256, segments of 128 in 10 lanes"
    assert f"stdlib valid 50 61,209 {how} 2.0000 2.885 bpc stdlib valid 50 61,208 {how}" in text
    assert "Newest first; 2 more in log.jsonl" in text


@pytest.mark.parametrize(
    ("change", "label", "settings"),
    [
        ({"temperature": 1.5}, "memory 256, temperature 1.5", "128 in 10 lanes; temperature 1.5; checkpoint"),
        ({"sliding": True, "mem_len": 0}, "sliding window of 128 tokens", "once; sliding window of 128 tokens; check"),
        ({"exhaustive": True}, "memory 256, exhaustive", "segments of 128 in 10 lanes; exhaustive; checkpoint"),
    ],
)
def test_a_result_that_was_not_measured_as_usual_says_so(tmp_path, change, label, settings):
    run = begun(tmp_path / "run")
    run.log("eval", 100, **(evaluation(1.5, 256, dropped=0) | change))
    text = shown(run).text
    assert f"2.164 bits per byte, {label} Measured on" in text
    assert settings in text


def test_titles_are_plain_names(tmp_path):
    run = FakeRun(tmp_path / "run", corpus="/home/ada/texts/letters.txt", options={"train.steps": "100"})
    run.config.name = "4-minutes"
    run.directory.write_config(run.config)
    run.start()
    run.train()
    html = write_report(run.path).read_text()
    assert html.count("4 minutes on letters.txt") == 2  # title and heading
    assert "/home/ada/texts/letters.txt, read as bytes" in html


def test_words_are_reported_in_perplexity_and_bits_per_byte_with_what_unk_hides(tmp_path, html):
    run = whole_run(tmp_path / "run", unit="word")
    row = run.directory.events()[-5]["rows"][-1]
    text = shown(run).text
    assert f"{row['ppl']:.2f} perplexity per word, memory 256" in text
    assert f"this model, memory 256 {row['bits_per_byte']:.3f}" in text
    assert "1,204 of the tokens read are <unk>" in text
    assert "the same 3,458,230 bytes" in text
    assert "lower bound" not in Page(html).text
    part = begun(tmp_path / "part", **{"data.unit": "word"})  # of a text whose bytes are then estimated
    part.log("eval", 100, **evaluation(4.0, 256, unit="word", tokens=990, dropped=9))
    part.compression(5400, 2000, 1900)
    assert "about the same 5,400 bytes" in shown(part).text


def test_a_loss_that_is_no_number_is_listed_but_is_neither_result_nor_drawn(tmp_path):
    run = begun(tmp_path / "run")
    run.sweep((0, 64, 256), ppl=None)  # an infinite perplexity
    bad = evaluation(1.0, 512) | {"nll": float("nan"), "ppl": float("nan"), "bpc": float("nan")}
    run.log("eval", 100, **bad)
    page = shown(run)
    assert "bits per byte, memory 256" in page.text
    assert "memory 512, window 512, segments of 128 in 10 lanes nan nan bpc" in page.text
    run.log("sweep", 100, **{name: bad[name] for name in MEASURED}, rows=[bad, bad])
    assert "bits per byte, memory 256" in shown(run).text


def test_circumstances_and_configuration_are_there(whole, html):
    text = Page(html).text
    for part, count in PARTS.items():
        assert f"{part} {count:,} {count / sum(PARTS.values()):.1%}" in text
    assert f"all {sum(PARTS.values()):,} 100.0%" in text
    for split in whole.corpus["splits"].values():
        assert split["sha256_text"] in text
        assert split["sha256_tokens"] in text
    assert "train 11,274,210 11,274,210" in text
    for row in ("d_model 128", "warmup_steps 200", "learning_rate 0.002", "clamp_len none", "cutoffs none"):
        assert row in text
    for row in ("processor Example CPU", "memory 8.0 GiB", "torch 2.13.0+cpu", "attention shifted"):
        assert row in text
    assert "txl train stdlib-tiny --out 'runs/my demo'" in text
    assert "Differs from the preset stdlib-tiny in: " in text
    assert "train.warmup_steps 100 → 200" in text
    assert "begun 21 September 2026, 14:13 UTC" in text


@pytest.mark.parametrize("kind", ["nothing", "config", "start", "validation"])
def test_without_training_there_is_no_report(tmp_path, kind):
    path = tmp_path / "run"
    if kind == "nothing":
        path.mkdir()
    else:
        run = FakeRun(path)
        if kind != "config":
            run.start()
        if kind == "validation":
            run.log("valid", 0, **evaluation(5.0, 128))
    with pytest.raises(UserError) as caught:
        write_report(path)
    assert "\n" not in str(caught.value)
    assert ("no config.json" if kind == "nothing" else "run txl train") in str(caught.value)
    assert not (path / "report.html").exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    run = begun(tmp_path / "run")
    (run.path / "report.html").write_text("old")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(txl.runs.directory.os, "replace", refuse)
    with pytest.raises(UserError, match=r"report\.html: cannot be written \(No space left on device\)"):
        write_report(run.path)
    assert (run.path / "report.html").read_text() == "old"
    assert not list(run.path.glob("*.partial"))
    with pytest.raises(UserError, match=r"none/report\.html: cannot be written"):
        write_report(run.path, out=tmp_path / "none" / "report.html")


def places_in(value, place=()):
    """Yield the place of every value in a JSON value; of a list, only of its first two."""
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in parts:
        yield from places_in(inner, (*place, key))


def replaced(value, place, new):
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


def test_no_value_of_another_kind_in_a_log_is_a_traceback(tmp_path, monkeypatch):
    """Each value at any depth of one event of each kind is replaced; figures are left out, because they take long."""
    for name in ("loss_figure", "schedule_figure", "memory_figure"):
        monkeypatch.setattr(report, name, lambda *_: Plot("none", "none", "none", 1.0, lambda figure: None))
    monkeypatch.setattr(Plot, "embedded", lambda plot: "")
    run = begun(tmp_path / "run")
    run.sweep(lengths=(0, 32))
    adaptation = {"rule": "sgd", "learning_rate": 0.1, "decay": 0.0, "weights": "all"}
    run.log("eval", 100, **evaluation(1.5, 32, **CACHE, dynamic=adaptation))
    run.compression(640_413, 200_000, 190_000)
    run.sample("a", "b")
    log = run.path / "log.jsonl"
    lines = log.read_text().splitlines()
    first = {json.loads(line)["event"]: number for number, line in reversed(list(enumerate(lines)))}
    generator, written = random.Random(0), 0
    for number in first.values():
        event = json.loads(lines[number])
        for place in list(places_in(event))[::2]:
            if place[:1] == ("config",) and place[1:2] not in (("train",), ("eval",)):
                continue  # checked as a configuration
            new = generator.choice([{}, [], None, "x", 2**63, -1, float("inf"), [{}]])
            log.write_text("\n".join([*lines[:number], json.dumps(replaced(event, place, new)), *lines[number + 1 :]]))
            with suppress(UserError):
                write_report(run.path)
                written += 1
    assert written > 50
