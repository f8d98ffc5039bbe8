// The list of items: found, filtered and drawn a page at a time. Everything is set as text, never
// as markup: questions, labels and replies are anybody's words.
const AT_ONCE = 50;
const MARKS = { right: "✓", wrong: "✗", partly: "◐", invalid: "⚠", failed: "!", missing: "–" };
const NAMES = {
  right: "right", wrong: "wrong", partly: "partly right", invalid: "invalid", failed: "failed",
  missing: "skipped",
};

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// An answer is [text, valid, score, confidence, replies, shown, tokens, USD, seconds, trace]; a
// number is the text of a failure, null was not asked.
function stateOf(answer) {
  if (answer === null) return "missing";
  if (!Array.isArray(answer)) return "failed";
  if (!answer[1]) return "invalid";
  return answer[2] === 1 ? "right" : answer[2] === 0 ? "wrong" : "partly";
}

class Items {
  constructor(card, section, texts, pictures) {
    Object.assign(this, { card, section, texts, pictures, first: 0, found: [] });
    this.lower = texts.map((text) => text.toLowerCase());
    const one = (name) => card.querySelector(`[data-${name}]`);
    [this.search, this.kind, this.count, this.list] = ["search", "kind", "count", "list"].map(one);
    this.boxes = [...card.querySelectorAll("fieldset input")];
    let waiting;
    this.search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.find(), 150);
    });
    this.kind.addEventListener("change", () => this.find());
    this.boxes.forEach((box) => box.addEventListener("change", () => this.find()));
    one("reset").addEventListener("click", () => this.ask("", "all", null));
    for (const [name, step] of [["back", -AT_ONCE], ["on", AT_ONCE]]) {
      card.querySelectorAll(`[data-${name}]`).forEach((button) =>
        button.addEventListener("click", () => this.turn(step)));
    }
    this.find();
  }

  get rows() {
    return this.boxes.filter((box) => box.checked).map((box) => Number(box.dataset.row));
  }

  ask(text, kind, row) {
    this.search.value = text;
    this.kind.value = kind;
    this.boxes.forEach((box) => { box.checked = row === null || box.dataset.row === row; });
    this.find();
  }

  find() {
    const rows = this.rows, wanted = this.kind.value;
    const parts = this.search.value.toLowerCase().split(";").map((part) => part.trim());
    const tests = parts.filter(Boolean).map((part) => this.test(part));
    this.found = [];
    this.section.items.forEach((item, place) => {
      const given = rows.map((row) => this.section.answers[row][place]);
      if (this.suits(given, wanted) && tests.every((test) => test(item, given))) {
        this.found.push(place);
      }
    });
    this.first = 0;
    this.draw();
  }

  suits(given, wanted) {
    if (wanted === "all") return true;
    if (wanted === "disagree") {
      return new Set(given.filter(Array.isArray).map((one) => (one[1] ? one[0] : -1))).size > 1;
    }
    const states = given.map(stateOf);
    return states.includes(wanted) || (wanted === "wrong" && states.includes("invalid"));
  }

  // Texts are looked through once, whatever the number of items. A text that is exactly what was
  // written after "truth:", "said:" or a tag's name rules out those that only contain it.
  test(part) {
    const where = /^(truth|said):\s*(.*)$/.exec(part);
    const wanted = where ? where[2] : part;
    const exact = (where || /^[^:]+: /.test(part)) && this.lower.includes(wanted);
    const hit = this.lower.map((text) => (exact ? text === wanted : text.includes(wanted)));
    const said = (one) => Array.isArray(one) && hit[one[0]];
    if (where && where[1] === "truth") return (item) => item[3].some((text) => hit[text]);
    if (where) return (item, given) => given.some(said);
    return (item, given) =>
      hit[item[0]] || [...item[2], ...item[3], ...item[4]].some((text) => hit[text]) ||
      given.some((one) => said(one) || (Array.isArray(one)
        ? one[4].some(([text]) => hit[text]) : one !== null && hit[one]));
  }

  turn(step) {
    this.first = Math.max(0, Math.min(this.first + step, this.found.length - 1));
    this.draw();
    this.card.scrollIntoView({ block: "start" });
  }

  draw() {
    const last = Math.min(this.first + AT_ONCE, this.found.length);
    const all = this.section.items.length.toLocaleString("en");
    const of = `${this.found.length.toLocaleString("en")} of ${all} items`;
    this.count.textContent = this.found.length ? `${this.first + 1}–${last} of ${of}` : of;
    this.card.querySelectorAll("[data-back]").forEach((b) => { b.disabled = this.first === 0; });
    this.card.querySelectorAll("[data-on]").forEach((b) => { b.disabled = last >= this.found.length; });
    const rows = this.rows;
    this.list.replaceChildren(
      ...this.found.slice(this.first, last).map((place) => this.item(place, rows)));
  }

  item(place, rows) {
    const [question, images, , truth] = this.section.items[place];
    const badges = element("div", { class: "badges" }, ...rows.map((row) => {
      const state = stateOf(this.section.answers[row][place]);
      return element("span", { class: state, title: NAMES[state] },
        `${MARKS[state]} ${this.section.rows[row]}`);
    }));
    const words = element("div", {},
      element("div", { class: "asked" }, `${place}. ${this.texts[question]}`),
      element("div", { class: "truth" }, "truth: ", element("b", {}, this.said(truth))), badges);
    const picture = images.length ? this.picture(images[0], "the question") : element("span");
    const made = element("details", { class: "item", "data-place": place },
      element("summary", {}, picture, words));
    made.addEventListener("toggle", () => {
      if (made.open && made.children.length === 1) made.append(this.opened(place, rows));
    });
    return made;
  }

  opened(place, rows) {
    const [, images, choices, , tags] = this.section.items[place];
    const made = element("div", { class: "opened" });
    if (images.length) {
      made.append(element("div", { class: "images" },
        ...images.map((one, i) => this.picture(one, `picture ${i + 1} of the question`))));
    }
    if (choices.length) {
      made.append(element("ul", { "aria-label": "choices" },
        ...choices.map((choice) => element("li", {}, this.texts[choice]))));
    }
    if (tags.length) made.append(element("p", { class: "spent" }, this.said(tags)));
    made.append(...rows.map((row) => this.given(row, place)));
    return made;
  }

  given(row, place) {
    const answer = this.section.answers[row][place], state = stateOf(answer);
    const made = element("div", { class: "given" }, element("h4", {}, this.section.rows[row]));
    const line = (...parts) => made.append(element("p", {}, ...parts));
    if (!Array.isArray(answer)) {
      line(element("span", { class: state }, `${MARKS[state]} ${NAMES[state]}`),
        answer === null ? "" : `: ${this.texts[answer]}`);
      return made;
    }
    const [text, , score, confidence, replies, shown, tokens, usd, seconds, trace] = answer;
    line(element("span", { class: state }, `${MARKS[state]} ${NAMES[state]}: `),
      element("b", {}, this.texts[text] || "(nothing)"),
      state === "partly" ? ` (score ${score})` : "",
      confidence === null ? "" : ` · confidence ${confidence.toFixed(2)}`);
    if (shown.length) made.append(element("ol", { class: "shown", "aria-label": "demonstrations, in the order shown" },
      ...shown.map((one, i) => this.demonstration(one, i + 1))));
    for (const [reply, times] of replies) {
      if (replies.length > 1 || times !== 1 || this.texts[reply] !== this.texts[text]) {
        const note = times === 0 ? "rationale: " : times > 1 ? `${times} ×: ` : "";
        made.append(element("pre", {}, note + this.texts[reply]));
      }
    }
    const spent = trace
      ? `${tokens.toLocaleString("en")} tokens · ${usd === null ? "cost unknown" : `${usd.toFixed(6)} USD`} · ${seconds} s · bottega log ${trace}`
      : "no model was called";
    made.append(element("p", { class: "spent" }, spent));
    return made;
  }

  demonstration([answer, images, score, text], order) {
    const words = this.texts[answer] || this.texts[text];
    const near = score === null ? "" : ` ${score.toFixed(2)}`;
    const shownAs = images.map((one) => this.picture(one, `demonstration ${order}`));
    const title = `${order}. ${this.texts[text]} → ${this.texts[answer]}`;
    return element("li", { title, ...(images.length ? {} : { class: "words" }) },
      ...shownAs, `${words.length > 160 ? `${words.slice(0, 160)}…` : words}${near}`);
  }

  picture(index, alt) {
    if (index < 0) return element("span", { class: "none" }, "no image stored");
    const made = element("img", { src: this.pictures[index], alt });
    made.addEventListener("load", () => {
      if (Math.max(made.naturalWidth, made.naturalHeight) <= 64) made.classList.add("tiny");
    });
    return made;
  }

  said(indices) {
    return indices.map((one) => this.texts[one]).join(", ") || "(nothing)";
  }
}

function begin() {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll("[data-section]").forEach((place) => {
    const section = data.sections[Number(place.dataset.section)];
    const card = place.querySelector("[data-items]");
    if (!card) return;
    const items = new Items(card, section, data.texts, data.pictures);
    const comparing = place.querySelector("[data-comparing]");
    if (comparing) compare(comparing, section.answers);
    place.querySelectorAll("[data-find]").forEach((link) => {
      link.addEventListener("click", () =>
        items.ask(link.dataset.find, link.dataset.show || "all", link.dataset.row || null));
    });
  });
  document.documentElement.dataset.ready = "yes";
}

// After the first paint: the tables and curves need no program.
setTimeout(begin, 0);
