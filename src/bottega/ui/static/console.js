"use strict";
// Pages work without this script. It refreshes statistics, previews files, accepts dropped files,
// submits forms without leaving the page, asks for confirmation, and switches the theme.

const THEMES = ["", "light", "dark"];
const root = document.documentElement;

function stored(name) {
  try { return localStorage.getItem(name) || ""; } catch { return ""; }
}

function setTheme(theme) {
  if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  try { localStorage.setItem("bottega-theme", theme); } catch { /* storage is disabled */ }
  const button = document.getElementById("theme");
  if (button) {
    button.hidden = false;
    button.textContent = `Theme: ${theme || "system"}`;
  }
}
setTheme(THEMES.includes(stored("bottega-theme")) ? stored("bottega-theme") : "");

function notify(text) {
  const line = document.getElementById("connection");
  line.textContent = text;
  line.hidden = !text;
}

async function load(url, options = {}) {
  const headers = { "x-requested-with": "console" };
  const response = await fetch(url, { credentials: "same-origin", ...options, headers });
  if (response.status === 401) throw new Error("Your session has ended. Log in again in another tab; this page keeps its contents.");
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  // Such as the error page of a proxy.
  if (!page.querySelector("main")) throw new Error(`The server replied with status ${response.status}. Your input is kept: try again.`);
  return { response, page };
}

function explain(error, nextStep) {
  notify(error instanceof TypeError ? `The server cannot be reached. ${nextStep}` : error.message);
}

function replace(selector, page) {
  const found = page.querySelector(selector) || page.querySelector("main");
  const old = document.querySelector(selector);
  if (!found || !old) return;
  const copy = document.importNode(found, true);
  if (found.matches("main")) {  // a page with an error
    old.replaceChildren(...copy.querySelectorAll(".notice, .notice ~ p"));
  } else {
    old.replaceWith(copy);
  }
}

async function refresh() {
  const live = document.querySelector("[data-refresh]");
  if (!live || document.hidden || live.contains(document.activeElement)) return;
  try {
    const { response, page } = await load(location.href);
    if (response.ok) replace(`#${live.id}`, page);
    notify(response.ok ? "" : "The server returned an error. The values on this page may be out of date.");
  } catch (error) {
    explain(error, "This page tries again in a few seconds.");
  }
}

const seconds = Number(document.querySelector("[data-refresh]")?.dataset.refresh || 0);
if (seconds > 0) setInterval(refresh, seconds * 1000);

// Show the reply to a form. After an error, the form keeps its contents.
function show(form, response, page) {
  let problem = "";
  if (form.dataset.inline) {
    replace(form.dataset.inline, page);
  } else if (response.ok) {
    const main = document.importNode(page.querySelector("main"), true);
    document.querySelector("main").replaceWith(main);
    main.focus();
  } else {
    const lines = page.querySelectorAll("main .notice, main .notice ~ p");
    problem = [...lines].map((one) => one.textContent).join(": ");
  }
  notify(problem);
}

async function submitForm(form, submitter) {
  const fields = new FormData(form, submitter);  // before the submitter is disabled
  form.classList.add("busy");
  const buttons = [...form.querySelectorAll("button:not(:disabled)")];
  buttons.forEach((button) => { button.disabled = true; });
  let isLeaving = false;
  try {
    if ("batches" in form.dataset) return await sendBatches(form, fields);
    // Not form.action: a button of that name would hide it.
    const { response, page } = await load(form.getAttribute("action") || location.href, { method: "POST", body: fields });
    isLeaving = response.redirected;  // after a change
    if (isLeaving) location.assign(response.url); else show(form, response, page);
  } catch (error) {
    explain(error, "Your input is kept: submit the form again.");
  } finally {
    if (!isLeaving) {
      form.classList.remove("busy");
      buttons.forEach((button) => { button.disabled = false; });
      submitter?.focus();
    }
  }
}

const BATCH_FILES = 50;
const BATCH_BYTES = 64 * 1024 * 1024;
const dropped = new WeakMap();  // files in dropped folders by input: a FileList has no paths

function chosenFiles(form) {
  return [...form.querySelectorAll("input[type=file]")].flatMap((input) => dropped.get(input)
    || [...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));
}

function* batches(files) {
  let batch = [], size = 0;
  for (const one of files) {
    if (batch.length >= BATCH_FILES || (batch.length && size + one.file.size > BATCH_BYTES)) {
      yield batch;
      batch = [];
      size = 0;
    }
    batch.push(one);
    size += one.file.size;
  }
  if (batch.length) yield batch;
}

function addReport(selector, page) {
  const shown = document.querySelector(`${selector} .notice`);
  const more = page.querySelector(`${selector} .notice`);
  if (!shown) return replace(selector, page);
  if (!more) {  // an error; earlier reports stay
    const problem = document.importNode(page.querySelector("main"), true);
    return document.querySelector(selector).append(...problem.querySelectorAll(".notice, .notice ~ p"));
  }
  const counts = more.querySelectorAll("[data-count]");
  shown.querySelectorAll("[data-count]").forEach((one, i) => {
    one.textContent = Number(one.textContent) + Number(counts[i].textContent);
  });
  shown.querySelector("ul").append(...document.importNode(more.querySelector("ul"), true).children);
  shown.className = more.querySelector("li") ? more.className : shown.className;
}

async function sendBatches(form, all) {
  const files = chosenFiles(form);
  let sent = 0;
  try {
    document.querySelector(form.dataset.inline).replaceChildren();
    for (const batch of files.length ? batches(files) : [[]]) {
      const fields = new FormData();
      for (const [name, value] of all) if (!(value instanceof File)) fields.append(name, value);
      for (const { file, path } of batch) fields.append("images", file, path);
      const { response, page } = await load(form.getAttribute("action"), { method: "POST", body: fields });
      addReport(form.dataset.inline, page);
      if (!response.ok) break;
      sent += batch.length;
      notify(sent < files.length ? `${sent} of ${files.length} files sent` : "");
    }
  } catch (error) {
    throw sent ? new Error(`${sent} of ${files.length} files were sent. Submit the form again: files that were added already are not added twice.`) : error;
  }
}

async function filesOf(entry, folder = "") {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => { entry.file(resolve, reject); });
    return [{ file, path: folder + file.name }];
  }
  const reader = entry.createReader();
  const found = [];
  for (;;) {  // a call returns at most 100 entries
    const part = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
    if (!part.length) return found;
    for (const one of part) found.push(...await filesOf(one, `${folder}${entry.name}/`));
  }
}

function confirmed(text, action) {
  const dialog = document.createElement("dialog");
  const question = document.createElement("p");
  const form = document.createElement("form");
  form.method = "dialog";
  question.textContent = text;
  for (const [value, title] of [["no", "Cancel"], ["yes", action]]) {
    const button = document.createElement("button");
    button.value = value;
    button.textContent = title;
    form.append(button, " ");
  }
  dialog.append(question, form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
  });
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  const question = event.submitter?.dataset.confirm || form.dataset.confirm;
  if (question && !form.dataset.agreed) {
    event.preventDefault();
    if (await confirmed(question, event.submitter?.textContent || "Continue")) {
      form.dataset.agreed = "yes";
      form.requestSubmit(event.submitter);
    }
    return;
  }
  delete form.dataset.agreed;
  if (form.getAttribute("method") === "post" && !("native" in form.dataset)) {
    event.preventDefault();
    await submitForm(form, event.submitter);
  }
});

document.addEventListener("click", (event) => {
  if (event.target.id === "theme") {
    setTheme(THEMES[(THEMES.indexOf(root.dataset.theme || "") + 1) % THEMES.length]);
  }
});

const PREVIEWS = 12;

function preview(input) {
  const shown = input.form?.querySelector(".previews");
  if (!shown) return;
  for (const image of shown.querySelectorAll("img")) URL.revokeObjectURL(image.src);
  const files = [...input.files].filter((file) => file.type.startsWith("image/"));
  const images = files.slice(0, PREVIEWS).map((file) => {
    const image = document.createElement("img");
    image.src = URL.createObjectURL(file);
    image.alt = file.name;
    return image;
  });
  const more = document.createElement("p");
  more.textContent = files.length > PREVIEWS ? `and ${files.length - PREVIEWS} more images` : "";
  shown.replaceChildren(...images, more);
}

document.addEventListener("change", (event) => {
  if (event.target.matches("input[type=file]")) {
    dropped.delete(event.target);
    preview(event.target);
  }
});

// Files that were chosen before this script ran.
for (const input of document.querySelectorAll("input[type=file]")) {
  if (input.files.length) preview(input);
}

async function choose(input, transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  let chosen = [...transfer.files].slice(0, input.multiple ? Infinity : 1);
  let found = null;
  if (input.multiple && entries.some((entry) => entry.isDirectory)) {
    found = (await Promise.all(entries.map((entry) => filesOf(entry)))).flat();
    chosen = found.map((one) => one.file);
  }
  const files = new DataTransfer();
  for (const file of chosen) files.items.add(file);
  input.files = files.files;
  if (found) dropped.set(input, found); else dropped.delete(input);
  preview(input);
}

// A browser would open files that are dropped beside a zone: the page and its forms would be lost.
for (const type of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(type, async (event) => {
    const zone = event.target.closest(".drop");
    if (!event.dataTransfer?.types.includes("Files") || (!zone && event.target.type === "file")) return;
    event.preventDefault();
    zone?.classList.toggle("over", type === "dragover");
    if (type !== "drop" || !zone) return;
    try {
      await choose(zone.querySelector("input[type=file]"), event.dataTransfer);
    } catch {
      notify("The dropped files cannot be read: choose files instead.");
    }
  });
}
