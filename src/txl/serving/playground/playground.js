// The playground: a text that the model reads and continues, token by token. Everything it does goes through
// /v1/streams; text from the server only ever becomes the text of a node.

const ALTERNATIVES = 8;
const RENDERED = 2000; // tokens that keep their colours and alternatives; older ones become plain text
const COLLAPSED_AT_ONCE = 250;
const DETAILED = 6000; // characters of one pasted text whose tokens are shown; what stands before is read, not coloured
const LEVELS = [1, 2, 4, 6, 9]; // bits at which the next colour begins
const LOCAL = 32; // tokens that the faint line averages
const KEY = "txl-api-key";

const find = (id) => document.getElementById(id);
const page = find("page"), tokensBox = find("tokens"), draft = find("draft"), details = find("details");
const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 0 });
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const anySeed = () => Math.floor(Math.random() * 2 ** 31);

// ---------------------------------------------------------------- the server

/** An answer other than success, as one line for the reader. */
class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Sends a request, with the key if there is one; asks for the key if the server wants it. */
async function ask(path, body, { method = body === undefined ? "GET" : "POST", signal } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Refused("The server does not answer. Is it still running?", 0, "lost");
    }
    if (answer.ok) return answer;
    const refused = await refusal(answer);
    if (refused.status !== 401 || !(await askForKey(key ? "That key was not accepted." : ""))) throw refused;
    signal?.throwIfAborted();
  }
}

async function refusal(answer) {
  const error = (await answer.json().catch(() => null))?.error ?? {};
  return refusedBy(error, answer.status, answer.headers.get("Retry-After"));
}

function refusedBy(error, status, after) {
  const message = error.message ?? `status ${status}`;
  if (status === 401) return new Refused("The server wants its API key.", status, error.code);
  if (status === 429 || status === 503) {
    const when = after ? `; try again in ${after === "1" ? "a second" : `${after} seconds`}` : "";
    return new Refused(`The server is busy: ${message.replace(/; try again( later)?$/, "")}${when}.`, status, error.code);
  }
  return new Refused(`The server refused: ${message}.`, status, error.code);
}

const askJson = async (...request) => (await ask(...request)).json();

/** Yields the objects of an event stream. */
async function* eventsOf(answer, signal) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw refusedBy(event.error, event.error.type === "service_unavailable_error" ? 503 : 500);
        yield event;
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof Refused) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new Refused("The connection to the server was lost; what came until then is kept.", 0, "lost");
}

let asking = null;

/** Asks for the key; resolves to whether one was given. */
function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = find("ask");
    find("ask-why").textContent = why;
    find("key").value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => { asking = null; resolve(dialog.returnValue === "given"); }, { once: true });
    dialog.showModal();
  });
  return asking;
}

find("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, find("key").value.trim());
  find("ask").close("given");
});
find("ask-cancel").addEventListener("click", () => find("ask").close());

// ---------------------------------------------------------------- branches

/** One line of the text: a stream of the server, and what this page knows of its tokens. */
class Branch {
  constructor(label) {
    this.label = label;
    this.stream = null; // as the server described it last
    this.unsure = false; // whether the server may have read more than what came here
    this.ids = []; // every token
    this.plain = ""; // the text before the tokens that are shown
    this.tokens = []; // those that are shown
    this.points = []; // what the strip shows of each token
    this.before = { bits: 0, characters: 0 }; // of tokens that were read without being shown
  }

  /** The same text up to a position, without a stream. */
  until(position, label) {
    const twin = new Branch(label);
    twin.ids = this.ids.slice(0, position);
    twin.plain = this.plain;
    twin.tokens = this.tokens.filter((token) => token.position < position);
    twin.points = this.points.filter((point) => point.position < position);
    twin.before = this.before;
    return twin;
  }

  add(tokens) {
    for (const token of tokens) {
      const last = this.points.at(-1) ?? this.before;
      const bits = token.surprisal;
      this.ids.push(token.id);
      this.tokens.push(token);
      this.points.push({
        position: token.position,
        surprisal: bits ?? 0,
        length: bits === null ? 0 : [...token.piece].length,
        bits: last.bits + (bits ?? 0),
        characters: last.characters + (bits === null ? 0 : [...token.piece].length),
        attention: token.attention,
      });
    }
  }

  get text() {
    return this.plain + this.tokens.map((token) => token.piece).join("");
  }
}

let branches = [];
let current = new Branch("beginning");
let model = null;
let running = null; // the AbortController of what is being done
let finished = Promise.resolve();

const pathOf = (branch) => `v1/streams/${branch.stream.id}`;
const seedWanted = () => (find("seed").value === "" ? null : Number(find("seed").value));

/** Forgets a branch's stream at the server. */
async function release(branch, keepalive = false) {
  if (!branch.stream) return;
  const path = pathOf(branch), key = sessionStorage.getItem(KEY);
  branch.stream = null;
  await fetch(path, { method: "DELETE", keepalive, headers: key ? { Authorization: `Bearer ${key}` } : {} }).catch(() => {});
}

/** Makes sure that a branch has a stream that has read exactly its tokens. */
async function settle(branch, signal) {
  await look(branch, signal);
  if (branch.stream?.tokens === branch.ids.length) return;
  const old = { stream: branch.stream };
  try {
    branch.stream = await streamAt(branch, branch.ids.length, undefined, signal);
    release(old);
  } catch (error) {
    if (error.code !== "too_many_streams" || !branch.stream) throw error;
    const { seed } = branch.stream;
    await release(branch); // no room for two: the one goes first
    branch.stream = await streamOf(branch.ids, seed, signal);
  }
}

/** Brings what is known of a branch's stream up to date, once what was stopped there has ended. */
async function look(branch, signal) {
  while (branch.stream && branch.unsure) {
    try {
      branch.stream = await askJson(pathOf(branch), undefined, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
      branch.stream = null;
    }
    branch.unsure = branch.stream?.busy ?? false;
    if (branch.unsure) await wait(20);
  }
}

/** Returns a new stream that has read some tokens. */
async function streamOf(ids, seed, signal) {
  const answer = await askJson("v1/streams", ids.length ? { tokens: ids, seed } : { seed }, { signal });
  return answer.stream ?? answer;
}

/** Returns a new stream that has read a branch's first tokens: a fork, or where that is not possible, from its tokens. */
async function streamAt(branch, position, seed, signal) {
  await look(branch, signal);
  const { stream } = branch;
  if (stream && position >= stream.fork_from && position <= stream.tokens) {
    try {
      return await askJson(`${pathOf(branch)}/fork`, { at: position, seed }, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  return streamOf(branch.ids.slice(0, position), seed ?? stream?.seed ?? seedWanted() ?? anySeed(), signal);
}

/** Reads text into a branch, with the tokens that are shown; returns nothing that was not read. */
async function read(branch, text, signal) {
  const cut = text.length > DETAILED ? boundary(text, text.length - DETAILED) : 0;
  if (cut) {
    const head = text.slice(0, cut);
    const { tokens } = await askJson("tokenize", { prompt: head }, { signal });
    for await (const event of follow(branch, "append", { tokens, stream: true }, signal)) sayRead(event);
    branch.plain = branch.text + head;
    branch.tokens = [];
    branch.ids.push(...tokens);
    branch.points = [];
    branch.before = { bits: branch.stream.bits, characters: branch.stream.characters };
    draft.value = text = text.slice(cut);
    show(branch);
  }
  await append(branch, { text }, signal);
}

/** Returns the first place from `from` on behind a line's end or a space. */
function boundary(text, from) {
  for (const mark of ["\n", " "]) {
    const found = text.indexOf(mark, from);
    if (found >= 0 && found < from + 2000) return found + 1;
  }
  return /[\uDC00-\uDFFF]/.test(text[from]) ? from + 1 : from; // not between the halves of a character
}

/** Asks something of a branch's stream, and yields what comes; the branch is unsure until the last of it. */
async function* follow(branch, route, body, signal) {
  const send = async () => {
    await settle(branch, signal);
    branch.unsure = true;
    return ask(`${pathOf(branch)}/${route}`, body, { signal });
  };
  const answer = await send().catch((error) => {
    if (error.status !== 404) throw error;
    branch.stream = null; // it was idle for too long, or the server is a new one
    return send();
  });
  for await (const event of eventsOf(answer, signal)) {
    if (event.stream) {
      branch.stream = event.stream;
      branch.unsure = false;
    }
    yield event;
  }
}

/** Appends text or tokens and shows what the model made of them. */
async function append(branch, body, signal, source) {
  const wanted = { ...body, logprobs: ALTERNATIVES, attention: find("attention").checked, stream: true };
  for await (const event of follow(branch, "append", wanted, signal)) {
    for (const token of event.tokens ?? []) token.source = source ?? token.source;
    take(branch, event.tokens ?? []);
    sayRead(event);
  }
}

function sayRead({ read, total }) {
  if (total > 500) say(`Reading ${number(read)} of ${number(total)} tokens`);
}

/** Lets the model go on. */
async function write(branch, count, signal) {
  await settle(branch, signal);
  const seed = seedWanted();
  const body = {
    max_tokens: count,
    temperature: Number(find("temperature").value),
    top_k: Number(find("top-k").value),
    top_p: Number(find("top-p").value),
    logprobs: ALTERNATIVES,
    attention: find("attention").checked,
    stream: true,
  };
  if (seed !== null && seed !== branch.stream.seed) body.seed = seed;
  say("Writing");
  const began = performance.now();
  let made = 0;
  for await (const event of follow(branch, "generate", body, signal)) {
    if (event.object === "stream.tokens") {
      take(branch, event.tokens);
      made += event.tokens.length;
      tell(made, (1000 * made) / (performance.now() - began));
    } else {
      tell(made, event.tokens_per_second);
      say(`Done, with seed ${event.seed}`);
    }
  }
}

/** Takes in tokens that came. */
function take(branch, tokens) {
  branch.add(tokens);
  if (branch === current) paintSoon();
}

// ---------------------------------------------------------------- what is done now

/** Does one thing at a time: shows that it runs, and what it ended with. */
async function run(work) {
  await stop();
  const controller = new AbortController();
  running = controller;
  complain("");
  say("");
  find("speed").textContent = "";
  showBusy();
  finished = (async () => {
    try {
      await work(controller.signal);
      if (find("status").textContent.startsWith("Reading")) say("");
    } catch (error) {
      if (controller.signal.aborted) say("Stopped");
      else {
        say("");
        complain(error instanceof Refused ? error.message : `This page failed: ${error.message}`);
        if (!(error instanceof Refused)) throw error;
      }
    } finally {
      if (running === controller) running = null;
      paint();
      if (!tokensBox.contains(document.activeElement)) rove(lastSpan());
      showBusy();
    }
  })();
  await finished.catch((error) => console.error(error));
}

/** Stops what runs; the page is idle when this resolves. */
async function stop() {
  running?.abort();
  await finished.catch(() => {});
}

async function goOn() {
  if (running || !valid()) return;
  const text = draft.value, count = Number(find("count").value);
  if (!text && !current.ids.length) {
    complain("Write something first: the model goes on from a text.");
    draft.focus();
    return;
  }
  const branch = current;
  await run(async (signal) => {
    if (!model) await begin(signal);
    if (text) {
      const had = branch.text.length;
      try {
        await read(branch, text, signal);
      } finally {
        // What was read is in the text now; what was not stays to be sent.
        const got = branch.text.slice(had);
        draft.value = text.startsWith(got) ? text.slice(got.length) : branch.ids.length ? "" : text;
        fit();
        showBusy();
      }
    }
    if (count) await write(branch, count, signal);
  });
}

/** Makes a second branch that keeps the tokens before a position, and goes on with one in particular, or any. */
async function fork(position, token) {
  if (!valid()) return;
  const from = current, count = Number(find("count").value);
  closeDetails(true);
  await stop();
  await run(async (signal) => {
    const label = token ? `“${nameOf(token)}” at ${position}` : `again at ${position}`;
    const twin = from.until(position, label);
    twin.stream = await streamAt(from, position, seedWanted() ?? anySeed(), signal);
    twin.from = from;
    branches.push(twin);
    show(twin);
    page.focus();
    if (token) await append(twin, { tokens: [token.id] }, signal, "chosen");
    if (count) await write(twin, count, signal);
  });
}

function valid() {
  if (find("controls").checkValidity()) return true;
  const wrong = find("controls").querySelector("input:invalid");
  find("settings").open ||= find("settings").contains(wrong);
  wrong.reportValidity();
  return false;
}

/** Begins anew, with a text to edit. */
async function restart(text) {
  await stop();
  for (const branch of branches.length ? branches : [current]) release(branch);
  branches = [];
  draft.value = text;
  find("speed").textContent = "";
  say("");
  complain("");
  show(new Branch("beginning"));
  draft.focus();
  draft.setSelectionRange(text.length, text.length);
}

// ---------------------------------------------------------------- status

function say(text) {
  if (find("status").textContent !== text) find("status").textContent = text;
}

function tell(made, speed) {
  find("speed").textContent = `${number(made)} tokens at ${number(speed, speed < 10 ? 1 : 0)} a second`;
}

function complain(text) {
  find("error").textContent = text;
  find("error").hidden = !text;
}

function showBusy() {
  const busy = running !== null, empty = !current.ids.length;
  find("continue").disabled = busy;
  find("stop").disabled = !busy;
  find("edit").disabled = empty;
  find("clear").disabled = empty && !draft.value && branches.length < 2;
  draft.readOnly = busy;
  tokensBox.classList.toggle("busy", busy);
  page.setAttribute("aria-busy", String(busy));
  draft.placeholder = busy ? "" : empty
    ? "Write or paste something, and the model goes on from there."
    : "Add text here, or just continue.";
}

// ---------------------------------------------------------------- tokens on the page

let painted = { branch: null, upTo: 0 }; // tokens of a branch that are on the page
let frame = 0;

function show(branch) {
  closeDetails(false);
  current = branch;
  if (!branches.includes(branch)) branches = [branch];
  tokensBox.replaceChildren();
  painted = { branch, upTo: 0 };
  if (branch.plain) collapseInto(branch.plain);
  paint();
  rove(lastSpan());
  showBranches();
  showBusy();
  page.scrollTop = page.scrollHeight;
}

function paintSoon() {
  frame ||= requestAnimationFrame(() => { frame = 0; paint(); });
}

/** Brings the page up to date with the branch. */
function paint() {
  const branch = painted.branch;
  const follow = page.scrollHeight - page.scrollTop - page.clientHeight < 60;
  if (branch.tokens.length > RENDERED + COLLAPSED_AT_ONCE) collapse(branch);
  for (; painted.upTo < branch.tokens.length; painted.upTo++) {
    const span = spanOf(branch.tokens[painted.upTo]);
    let block = tokensBox.lastElementChild;
    if (!block || block.classList.contains("plain") || block.lastChild?.token?.piece.endsWith("\n")) {
      block = document.createElement("div");
      block.className = "block";
      tokensBox.append(block);
    }
    block.append(span);
  }
  tokensBox.hidden = !branch.ids.length;
  if (follow) page.scrollTop = page.scrollHeight;
  drawSoon();
}

const firstSpan = () => tokensBox.querySelector(".t");
const lastSpan = () => [...(tokensBox.lastElementChild?.querySelectorAll(".t") ?? [])].at(-1);

function spanOf(token) {
  const span = document.createElement("span");
  span.token = token;
  span.tabIndex = -1;
  span.className = `t ${level(token)} ${token.source}`;
  if (!token.piece) span.classList.add("part");
  if (token.piece.includes("\n")) span.classList.add("line");
  span.textContent = token.piece;
  return span;
}

function level(token) {
  return token.surprisal === null ? "s0" : `s${LEVELS.filter((bits) => token.surprisal >= bits).length}`;
}

/** Turns the oldest tokens into plain text, so that a long text stays fast. */
function collapse(branch) {
  const begun = takeBegun();
  const old = branch.tokens.splice(0, branch.tokens.length - RENDERED);
  const text = old.map((token) => token.piece).join("");
  branch.plain += text;
  const gone = Math.min(painted.upTo, old.length);
  painted.upTo -= gone;
  if (active && old.includes(active.token)) closeDetails(false);
  for (let left = gone; left > 0; left--) {
    const span = firstSpan(), block = span.parentNode;
    span.remove();
    if (!block.hasChildNodes()) block.remove();
  }
  collapseInto(begun + text);
}

/** Takes the plain text that begins a line off the page. */
function takeBegun() {
  const begun = tokensBox.querySelector(".begun");
  begun?.remove();
  return begun?.textContent ?? "";
}

/** Adds plain text before the tokens: whole lines as blocks of their own, and what begins a line before its first token. */
function collapseInto(text) {
  const cut = text.lastIndexOf("\n") + 1;
  const block = [...tokensBox.children].find((each) => !each.classList.contains("plain"));
  if (cut) {
    const lines = document.createElement("div");
    lines.className = "plain";
    lines.textContent = text.slice(0, cut);
    tokensBox.insertBefore(lines, block ?? null);
  }
  if (cut < text.length) {
    const begun = document.createElement("span");
    begun.className = "begun";
    begun.textContent = text.slice(cut);
    if (block) block.prepend(begun);
    else {
      const made = document.createElement("div");
      made.className = "block";
      made.append(begun);
      tokensBox.append(made);
    }
  }
}

/** Returns text whose white space and control characters can be seen. */
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f-\u009f]/g, (each) => `U+${each.codePointAt(0).toString(16).padStart(4, "0").toUpperCase()}`);
}

/** Returns a token's name: its text, or the bytes of a part of a character. */
const nameOf = (token) => (token.text.startsWith("bytes:") ? token.text.slice(6) : visible(token.text)) || "∅";

// ---------------------------------------------------------------- a token's alternatives

let active = null; // the span whose alternatives are shown
let pinned = false;
let returning = false; // whether a token gets the focus back, which opens nothing
let hiding = 0;

function openDetails(span, pin) {
  clearTimeout(hiding);
  pinned = pin;
  if (active === span && !details.hidden) return;
  active?.classList.remove("active");
  active = span;
  span.classList.add("active");
  const token = span.token;
  const heading = document.createElement("h2");
  heading.textContent = nameOf(token);
  details.replaceChildren(heading, paragraph(costOf(token)));
  if (token.attention) {
    const { mean, reach } = token.attention;
    details.append(paragraph(`attention ${number(mean, 1)} back, 90% within ${number(reach)} tokens`));
  }
  if (token.top.length) {
    const list = document.createElement("ol");
    list.setAttribute("aria-label", "Alternatives");
    for (const other of token.top) list.append(row(token, other));
    if (!token.top.some((other) => other.id === token.id)) list.append(row(token, token));
    details.append(list);
    const again = document.createElement("button");
    again.type = "button";
    again.className = "again";
    again.textContent = "Draw again from here";
    again.addEventListener("click", () => fork(token.position, null));
    if (token.position) details.append(again);
  }
  details.hidden = false;
  place(span);
  const sheet = details.getBoundingClientRect(), bottom = span.getBoundingClientRect().bottom + 8;
  if (sheet.width >= document.documentElement.clientWidth && bottom > sheet.top) page.scrollTop += bottom - sheet.top;
  drawSoon();
}

function paragraph(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element;
}

function costOf(token) {
  if (token.surprisal === null) return "the first token: nothing stands before it";
  return `${number(token.surprisal, 2)} bits, rank ${number(token.rank)}, probability ${percent(Math.exp(token.logprob))}`;
}

function percent(part) {
  return part >= 0.0995 ? `${number(100 * part)}%` : part >= 0.00095 ? `${number(100 * part, 1)}%` : "<0.1%";
}

function row(token, other) {
  const item = document.createElement("li"), button = document.createElement("button");
  const name = document.createElement("span"), chance = document.createElement("span");
  const part = Math.exp(other.logprob);
  name.textContent = nameOf(other);
  chance.textContent = percent(part);
  button.type = "button";
  button.className = "other";
  button.style.setProperty("--part", part);
  button.append(name, chance);
  if (other.id === token.id) {
    button.setAttribute("aria-current", "true");
    button.title = "This token stands here";
    button.addEventListener("click", () => closeDetails(true));
  } else {
    button.title = "Go on from here with this token";
    button.addEventListener("click", () => fork(token.position, other));
  }
  item.append(button);
  return item;
}

function place(span) {
  const boxes = span.getClientRects();
  const at = boxes[boxes.length - 1] ?? span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = details;
  const below = at.bottom + 6, above = at.top - 6 - height;
  const top = below + height <= innerHeight - 8 || above < 8 ? Math.min(below, innerHeight - height - 8) : above;
  details.style.top = `${Math.max(8, top)}px`;
  details.style.left = `${Math.max(8, Math.min(at.left - 12, document.documentElement.clientWidth - width - 8))}px`;
}

function closeDetails(refocus) {
  clearTimeout(hiding);
  const span = active, held = details.contains(document.activeElement);
  details.hidden = true;
  active?.classList.remove("active");
  active = null;
  pinned = false;
  if (refocus && held && span?.isConnected) {
    returning = true;
    span.focus();
    returning = false;
  }
  drawSoon();
}

/** Makes one token the one that Tab reaches. */
function rove(span) {
  for (const each of tokensBox.querySelectorAll("[tabindex='0']")) if (each !== span) each.tabIndex = -1;
  if (span) span.tabIndex = 0;
}

const tokenAt = (event) => event.target.closest?.(".t");

tokensBox.addEventListener("pointerover", (event) => {
  const span = tokenAt(event);
  if (span && event.pointerType === "mouse" && !pinned && !event.buttons) openDetails(span, false);
});
tokensBox.addEventListener("pointerout", () => hideSoon());
details.addEventListener("pointerenter", () => clearTimeout(hiding));
details.addEventListener("pointerleave", () => hideSoon());

function hideSoon() {
  clearTimeout(hiding);
  if (!pinned) hiding = setTimeout(() => { if (!pinned) closeDetails(false); }, 250);
}

tokensBox.addEventListener("click", (event) => {
  const span = tokenAt(event);
  if (!span || !getSelection().isCollapsed) return;
  if (pinned && active === span) return closeDetails(false);
  rove(span);
  span.focus({ preventScroll: true });
  openDetails(span, true);
});
tokensBox.addEventListener("focusin", (event) => {
  const span = tokenAt(event);
  if (!span) return;
  rove(span);
  span.setAttribute("role", "button");
  span.setAttribute("aria-haspopup", "true");
  span.setAttribute("aria-label", `${nameOf(span.token)}, ${costOf(span.token)}`);
  if (!returning && span.matches(":focus-visible")) openDetails(span, true);
});
tokensBox.addEventListener("focusout", (event) => {
  const span = tokenAt(event);
  for (const name of ["role", "aria-haspopup", "aria-label"]) span?.removeAttribute(name);
});
tokensBox.addEventListener("keydown", (event) => {
  const span = tokenAt(event);
  if (!span || event.altKey || event.ctrlKey || event.metaKey) return;
  const spans = [...tokensBox.querySelectorAll(".t")], here = spans.indexOf(span);
  const to = {
    ArrowRight: () => spans[here + 1],
    ArrowLeft: () => spans[here - 1],
    ArrowDown: () => otherLine(spans, here, 1),
    ArrowUp: () => otherLine(spans, here, -1),
    Home: () => spans[0],
    End: () => spans.at(-1),
  }[event.key];
  if (to) {
    event.preventDefault();
    to()?.focus();
    to()?.scrollIntoView({ block: "nearest" });
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    openDetails(span, true);
    details.querySelector("button")?.focus();
  }
});

/** Returns the token nearest in the next line, or the one before. */
function otherLine(spans, here, step) {
  const from = spans[here].getBoundingClientRect();
  let best, line;
  for (let at = here + step; at >= 0 && at < spans.length; at += step) {
    const box = spans[at].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    if (line !== undefined && Math.abs(box.top - line) > from.height / 2) break;
    line = box.top;
    if (!best || Math.abs(box.left - from.left) < Math.abs(best.getBoundingClientRect().left - from.left)) best = spans[at];
  }
  return best;
}

details.addEventListener("keydown", (event) => {
  const buttons = [...details.querySelectorAll("button")], here = buttons.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) {
    event.preventDefault();
    buttons[(here + step + buttons.length) % buttons.length]?.focus();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("ask").open) return;
  if (!details.hidden) closeDetails(true);
  else if (running) stop();
});
document.addEventListener("pointerdown", (event) => {
  if (!details.hidden && !details.contains(event.target) && !tokenAt(event)) closeDetails(false);
});
page.addEventListener("scroll", () => {
  if (active && !details.hidden) {
    if (pinned) place(active);
    else closeDetails(false);
  }
});

// ---------------------------------------------------------------- the row of branches

function showBranches() {
  const list = find("branches").querySelector("ol");
  list.replaceChildren();
  branches.forEach((branch, at) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = `${at + 1}  ${branch.label}`;
    button.addEventListener("click", async () => { await stop(); show(branch); });
    item.append(button);
    if (branch === current) {
      button.setAttribute("aria-current", "true");
      const close = document.createElement("button");
      close.type = "button";
      close.className = "close";
      close.textContent = "×";
      close.setAttribute("aria-label", `Delete branch ${at + 1}`);
      close.addEventListener("click", () => remove(branch));
      item.append(close);
    }
    list.append(item);
  });
  find("branches").hidden = branches.length < 2;
  list.querySelector("[aria-current]")?.parentNode.scrollIntoView({ block: "nearest", inline: "nearest" });
}

async function remove(branch) {
  await stop();
  release(branch);
  branches = branches.filter((each) => each !== branch);
  show(branches.includes(branch.from) ? branch.from : branches[0]);
  find("branches").querySelector("[aria-current]")?.focus();
}

// ---------------------------------------------------------------- the strip

let drawing = 0, drawn = 0;

/** Draws the strip soon, but not more than some times a second while text comes. */
function drawSoon() {
  drawing ||= setTimeout(() => { drawing = 0; drawn = performance.now(); draw(); }, Math.max(0, 100 - (performance.now() - drawn)));
}

function draw() {
  const points = current.points;
  find("strip").hidden = points.length < 2;
  if (points.length < 2) return;
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const at = active ? active.token.position - points[0].position : -1;
  const chosen = points[at] ?? points.at(-1);
  const watched = points.some((point) => point.attention);
  find("memory").parentNode.hidden = !watched;
  if (watched) drawMemory(points, at, colour);
  drawBits(points, at, colour);
  const ratio = chosen.characters ? chosen.bits / chosen.characters : null;
  find("bits").textContent = ratio === null ? "" : `${number(ratio, 2)} over ${number(chosen.characters)} characters`;
  find("reach").textContent = chosen.attention
    ? `mean ${number(chosen.attention.mean, 1)}, 90% within ${number(chosen.attention.reach)}`
    : "";
}

/** Prepares a canvas; returns its context, its size, and the tokens that each column stands for. */
function columnsOf(canvas, n) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "10px system-ui, sans-serif";
  const left = 26, step = Math.min(6, (width - left) / n);
  const columns = [];
  for (let x = left, from = 0; from < n; x += Math.max(1, step)) {
    const to = Math.min(n, Math.max(from + 1, Math.round((x + Math.max(1, step) - left) / step)));
    columns.push({ x, from, to, width: Math.max(1, step) });
    from = to;
  }
  return { context, width, height, left, step, columns };
}

function drawMemory(points, at, colour) {
  const canvas = find("memory");
  const { context, height, left, step, columns } = columnsOf(canvas, points.length);
  const rows = 1 + Math.ceil(Math.log2((model?.memory ?? 1) + 1));
  const top = 3, row = (height - top) / rows;
  const heightOf = (distance) => height - row * Math.log2(distance + 1) - row / 2;
  context.fillStyle = colour("--soft");
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (let each = 0; each < rows; each += 3) context.fillText(String(2 ** each - (each ? 0 : 1)), left - 5, Math.max(top + 5, heightOf(2 ** each - 1)));
  const heat = colour("--heat");
  const line = [];
  for (const column of columns) {
    const sums = new Array(rows).fill(0);
    let n = 0, reach = 0;
    for (let each = column.from; each < column.to; each++) {
      const attention = points[each].attention;
      if (!attention) continue;
      attention.histogram.forEach((part, number) => { if (number < rows) sums[number] += part; });
      reach += attention.reach;
      n++;
    }
    if (!n) continue;
    sums.forEach((sum, number) => {
      if (sum <= 0) return;
      context.fillStyle = `rgba(${heat}, ${Math.min(1, Math.sqrt(sum / n) * 1.05).toFixed(3)})`;
      context.fillRect(column.x, height - row * (number + 1), column.width + 0.35, row - 0.5);
    });
    line.push([column.x + column.width / 2, heightOf(reach / n)]);
  }
  strokeLine(context, line, colour("--trace"), 1.5);
  mark(context, at, left, step, height, colour);
  canvas.setAttribute("aria-label", `Attention by distance for ${points.length} tokens; ${find("reach").textContent}`);
}

function drawBits(points, at, colour) {
  const canvas = find("compression");
  const { context, width, height, left, step, columns } = columnsOf(canvas, points.length);
  const overall = [], local = [];
  for (const column of columns) {
    const end = points[column.to - 1], begin = points[column.to - 1 - LOCAL];
    if (end.characters) overall.push([column.x + column.width / 2, end.bits / end.characters]);
    if (begin && end.characters > begin.characters) {
      local.push([column.x + column.width / 2, (end.bits - begin.bits) / (end.characters - begin.characters)]);
    }
  }
  const most = Math.min(10, Math.max(2, ...overall.slice(Math.min(20, overall.length >> 1)).map((each) => each[1]), ...local.map((each) => each[1])) * 1.1);
  const y = (bits) => Math.max(2, height - 2 - (bits / most) * (height - 6));
  context.fillStyle = colour("--soft");
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.strokeStyle = colour("--line");
  context.lineWidth = 1;
  const tick = most > 5 ? 4 : most > 2.5 ? 2 : 1;
  for (let bits = 0; bits <= most; bits += tick) {
    context.fillText(String(bits), left - 5, Math.min(height - 5, Math.max(6, y(bits))));
    if (bits) context.strokeRect(left, Math.round(y(bits)) + 0.5, width - left, 0);
  }
  const scaled = (line) => line.filter(([, bits]) => bits <= most).map(([x, bits]) => [x, y(bits)]);
  strokeLine(context, scaled(local), colour("--faint"), 1);
  strokeLine(context, scaled(overall), colour("--accent"), 2);
  mark(context, at, left, step, height, colour);
  canvas.setAttribute("aria-label", `Bits per character as the text grows; ${find("bits").textContent}`);
}

function strokeLine(context, line, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  line.forEach(([x, y], number) => (number ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

/** Marks the token whose alternatives are shown. */
function mark(context, at, left, step, height, colour) {
  if (at < 0) return;
  context.fillStyle = colour("--ink");
  context.fillRect(left + (at + 0.5) * step - 0.75, 0, 1.5, height);
}

new ResizeObserver(drawSoon).observe(find("strip"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);

// ---------------------------------------------------------------- controls

/** Makes the field for text as high as its text. */
function fit() {
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight}px`;
}

function showChosen() {
  const k = Number(find("top-k").value), p = Number(find("top-p").value), seed = find("seed").value;
  const parts = [`temperature ${find("temperature").value}`];
  if (k) parts.push(`top-k ${k}`);
  if (p < 1) parts.push(`top-p ${p}`);
  if (seed) parts.push(`seed ${seed}`);
  find("chosen").textContent = parts.join(", ");
}

find("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  goOn();
});
find("controls").addEventListener("input", showChosen);
find("stop").addEventListener("click", () => stop());
find("edit").addEventListener("click", () => restart(current.text + draft.value).then(fit));
find("clear").addEventListener("click", () => restart("").then(fit));
draft.addEventListener("input", () => { fit(); showBusy(); });
draft.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    goOn();
  }
});
page.addEventListener("click", (event) => {
  if (event.target === page && getSelection().isCollapsed) draft.focus();
});
addEventListener("resize", () => { fit(); if (active) closeDetails(false); });
addEventListener("pagehide", () => {
  for (const branch of branches) release(branch, true); // who comes back gets new ones
});

/** Asks which model is served. */
async function begin(signal) {
  const { data: [first] } = await askJson("v1/models", undefined, { signal });
  model = first.txl;
  find("model").textContent = first.id;
  document.title = `${first.id} · txl playground`;
  const units = { byte: "bytes", char: "characters", word: "words", bpe: "BPE tokens" };
  const { kind, size } = model.vocabulary;
  find("about").textContent = `${compact.format(model.parameters)} parameters · ${number(size)} ${units[kind] ?? kind} · memory ${number(model.mem_len)}`;
  find("count").max = model.limits.max_tokens;
}

show(current);
showChosen();
fit();
run(begin);
