// List of items with search, filters and pages. All data are set as text, never as markup: questions,
// labels and replies are untrusted.
const PAGE_SIZE = 50;
const MARKS = { right: "✓", wrong: "✗", partly: "◐", invalid: "⚠", failed: "!", missing: "–" };
const NAMES = {
  right: "right", wrong: "wrong", partly: "partly right", invalid: "invalid", failed: "failed",
  missing: "missing",
};

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// An answer is [text, valid, score, confidence, replies, demonstrations, tokens, USD, seconds,
// trace]; a number is the index of an error text; null is a missing item.
function stateOf(answer) {
  if (answer === null) return "missing";
  if (!Array.isArray(answer)) return "failed";
  if (!answer[1]) return "invalid";
  return answer[2] === 1 ? "right" : answer[2] === 0 ? "wrong" : "partly";
}

class Items {
  constructor(card, section, texts, images) {
    Object.assign(this, { card, section, texts, images, first: 0, matches: [] });
    this.lower = texts.map((text) => text.toLowerCase());
    const find = (name) => card.querySelector(`[data-${name}]`);
    [this.search, this.kind, this.count, this.list] = ["search", "kind", "count", "list"].map(find);
    this.boxes = [...card.querySelectorAll("fieldset input")];
    let timer;
    this.search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.filter(), 150);
    });
    this.kind.addEventListener("change", () => this.filter());
    this.boxes.forEach((box) => box.addEventListener("change", () => this.filter()));
    find("reset").addEventListener("click", () => this.show("", "all", null));
    for (const [name, step] of [["previous", -PAGE_SIZE], ["next", PAGE_SIZE]]) {
      card.querySelectorAll(`[data-${name}]`).forEach((button) =>
        button.addEventListener("click", () => this.page(step)));
    }
    this.filter();
  }

  get rows() {
    return this.boxes.filter((box) => box.checked).map((box) => Number(box.dataset.row));
  }

  show(text, kind, row) {
    this.search.value = text;
    this.kind.value = kind;
    this.boxes.forEach((box) => { box.checked = row === null || box.dataset.row === row; });
    this.filter();
  }

  filter() {
    const rows = this.rows, kind = this.kind.value;
    const parts = this.search.value.toLowerCase().split(";").map((part) => part.trim());
    const conditions = parts.filter(Boolean).map((part) => this.condition(part));
    this.matches = [];
    this.section.items.forEach((item, index) => {
      const answers = rows.map((row) => this.section.answers[row][index]);
      if (this.hasKind(answers, kind) && conditions.every((holds) => holds(item, answers))) {
        this.matches.push(index);
      }
    });
    this.first = 0;
    this.render();
  }

  hasKind(answers, kind) {
    if (kind === "all") return true;
    if (kind === "disagree") {
      const texts = answers.filter(Array.isArray).map((answer) => (answer[1] ? answer[0] : -1));
      return new Set(texts).size > 1;
    }
    const states = answers.map(stateOf);
    return states.includes(kind) || (kind === "wrong" && states.includes("invalid"));
  }

  // Each distinct text is searched once per filter. After "truth:", "answer:" or a tag's name, an
  // exact match of a text excludes substring matches.
  condition(part) {
    const field = /^(truth|answer):\s*(.*)$/.exec(part);
    const pattern = field ? field[2] : part;
    const exact = (field || /^[^:]+: /.test(part)) && this.lower.includes(pattern);
    const hit = this.lower.map((text) => (exact ? text === pattern : text.includes(pattern)));
    const answerHit = (answer) => Array.isArray(answer) && hit[answer[0]];
    if (field && field[1] === "truth") return (item) => item[3].some((text) => hit[text]);
    if (field) return (item, answers) => answers.some(answerHit);
    return (item, answers) =>
      hit[item[0]] || [...item[2], ...item[3], ...item[4]].some((text) => hit[text]) ||
      answers.some((answer) => answerHit(answer) || (Array.isArray(answer)
        ? answer[4].some(([text]) => hit[text]) : answer !== null && hit[answer]));
  }

  page(step) {
    this.first = Math.max(0, Math.min(this.first + step, this.matches.length - 1));
    this.render();
    this.card.scrollIntoView({ block: "start" });
  }

  render() {
    const last = Math.min(this.first + PAGE_SIZE, this.matches.length);
    const all = this.section.items.length.toLocaleString("en");
    const of = `${this.matches.length.toLocaleString("en")} of ${all} items`;
    this.count.textContent = this.matches.length ? `${this.first + 1}–${last} of ${of}` : of;
    this.card.querySelectorAll("[data-previous]").forEach((b) => { b.disabled = this.first === 0; });
    this.card.querySelectorAll("[data-next]").forEach((b) => {
      b.disabled = last >= this.matches.length;
    });
    const rows = this.rows;
    this.list.replaceChildren(
      ...this.matches.slice(this.first, last).map((index) => this.item(index, rows)));
  }

  item(index, rows) {
    const [question, images, , truth] = this.section.items[index];
    const badges = element("div", { class: "badges" }, ...rows.map((row) => {
      const state = stateOf(this.section.answers[row][index]);
      return element("span", { class: state, title: NAMES[state] },
        `${MARKS[state]} ${this.section.rows[row]}`);
    }));
    const caption = element("div", {},
      element("div", { class: "question" }, `${index}. ${this.texts[question]}`),
      element("div", { class: "truth" }, "truth: ", element("b", {}, this.joined(truth))), badges);
    const image = images.length ? this.image(images[0], "the question") : element("span");
    const item = element("details", { class: "item", "data-index": index },
      element("summary", {}, image, caption));
    item.addEventListener("toggle", () => {
      if (item.open && item.children.length === 1) item.append(this.details(index, rows));
    });
    return item;
  }

  details(index, rows) {
    const [, images, choices, , tags] = this.section.items[index];
    const details = element("div", { class: "details" });
    if (images.length) {
      details.append(element("div", { class: "images" },
        ...images.map((image, i) => this.image(image, `image ${i + 1} of the question`))));
    }
    if (choices.length) {
      details.append(element("ul", { "aria-label": "choices" },
        ...choices.map((choice) => element("li", {}, this.texts[choice]))));
    }
    if (tags.length) details.append(element("p", { class: "cost" }, this.joined(tags)));
    details.append(...rows.map((row) => this.answer(row, index)));
    return details;
  }

  answer(row, index) {
    const answer = this.section.answers[row][index], state = stateOf(answer);
    const block = element("div", { class: "answer" }, element("h4", {}, this.section.rows[row]));
    const line = (...parts) => block.append(element("p", {}, ...parts));
    if (!Array.isArray(answer)) {
      line(element("span", { class: state }, `${MARKS[state]} ${NAMES[state]}`),
        answer === null ? "" : `: ${this.texts[answer]}`);
      return block;
    }
    const [text, , score, confidence, replies, demonstrations, tokens, usd, seconds, trace] = answer;
    line(element("span", { class: state }, `${MARKS[state]} ${NAMES[state]}: `),
      element("b", {}, this.texts[text] || "(nothing)"),
      state === "partly" ? ` (score ${score})` : "",
      confidence === null ? "" : ` · confidence ${confidence.toFixed(2)}`);
    if (demonstrations.length) {
      const label = "demonstrations, in prompt order";
      block.append(element("ol", { class: "demonstrations", "aria-label": label },
        ...demonstrations.map((one, i) => this.demonstration(one, i + 1))));
    }
    for (const [reply, count] of replies) {
      if (replies.length > 1 || count !== 1 || this.texts[reply] !== this.texts[text]) {
        const note = count === 0 ? "rationale: " : count > 1 ? `${count} ×: ` : "";
        block.append(element("pre", {}, note + this.texts[reply]));
      }
    }
    const cost = trace
      ? `${tokens.toLocaleString("en")} tokens · ${usd === null ? "cost unknown" : `${usd.toFixed(6)} USD`} · ${seconds} s · bottega explain ${trace} --traces ${this.section.runs[row]}`
      : "no model was called";
    block.append(element("p", { class: "cost" }, cost));
    return block;
  }

  demonstration([answer, images, score, text], order) {
    const label = this.texts[answer] || this.texts[text];
    const similarity = score === null ? "" : ` ${score.toFixed(2)}`;
    const thumbnails = images.map((image) => this.image(image, `demonstration ${order}`));
    const title = `${order}. ${this.texts[text]} → ${this.texts[answer]}`;
    return element("li", { title, ...(images.length ? {} : { class: "text-only" }) },
      ...thumbnails, `${label.length > 160 ? `${label.slice(0, 160)}…` : label}${similarity}`);
  }

  image(index, alt) {
    if (index < 0) return element("span", { class: "none" }, "no image stored");
    const image = element("img", { src: this.images[index], alt });
    image.addEventListener("load", () => {
      if (Math.max(image.naturalWidth, image.naturalHeight) <= 64) image.classList.add("tiny");
    });
    return image;
  }

  joined(indices) {
    return indices.map((index) => this.texts[index]).join(", ") || "(nothing)";
  }
}

function begin() {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll("[data-section]").forEach((part) => {
    const section = data.sections[Number(part.dataset.section)];
    const card = part.querySelector("[data-items]");
    if (!card) return;
    const items = new Items(card, section, data.texts, data.images);
    const comparison = part.querySelector("[data-comparison]");
    if (comparison) compare(comparison, section.answers);
    part.querySelectorAll("[data-find]").forEach((link) => {
      link.addEventListener("click", () =>
        items.show(link.dataset.find, link.dataset.show || "all", link.dataset.row || null));
    });
  });
  document.documentElement.dataset.ready = "yes";
}

// Start after the first paint: the tables and curves need no JavaScript.
setTimeout(begin, 0);
