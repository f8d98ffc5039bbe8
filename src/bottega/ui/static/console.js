"use strict";
// Pages work without this script. It refreshes figures, previews and drops files, submits forms
// in place, asks before deletions, and switches the theme.

const THEMES = ["", "light", "dark"];
const root = document.documentElement;

function stored(name) {
  try { return localStorage.getItem(name) || ""; } catch { return ""; }
}

function setTheme(theme) {
  if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
  try { localStorage.setItem("bottega-theme", theme); } catch { /* private windows */ }
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
  if (response.status === 401) throw new Error("The session has ended. Log in again to continue; this page stays as it is.");
  return { response, page: new DOMParser().parseFromString(await response.text(), "text/html") };
}

function explain(error) {
  notify(error instanceof TypeError ? "The connection to the server is lost. Nothing on this page is lost; it tries again." : error.message);
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
    notify(response.ok ? "" : "The server reports an error; the figures are not current.");
  } catch (error) {
    explain(error);
  }
}

const seconds = Number(document.querySelector("[data-refresh]")?.dataset.refresh || 0);
if (seconds > 0) setInterval(refresh, seconds * 1000);

async function submitInline(form, submitter) {
  const fields = new FormData(form, submitter);
  form.classList.add("busy");
  const buttons = [...form.querySelectorAll("button:not(:disabled)")];
  buttons.forEach((button) => { button.disabled = true; });
  try {
    // Not form.action: a button of that name would hide it.
    const { page } = await load(form.getAttribute("action") || location.href, { method: "POST", body: fields });
    replace(form.dataset.inline, page);
    notify("");
  } catch (error) {
    explain(error);
  } finally {
    form.classList.remove("busy");
    buttons.forEach((button) => { button.disabled = false; });
    submitter?.focus();
  }
}

function confirmed(text) {
  const dialog = document.createElement("dialog");
  const question = document.createElement("p");
  const form = document.createElement("form");
  form.method = "dialog";
  question.textContent = text;
  for (const [value, title] of [["no", "Cancel"], ["yes", "Continue"]]) {
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
    if (await confirmed(question)) {
      form.dataset.agreed = "yes";
      form.requestSubmit(event.submitter);
    }
    return;
  }
  delete form.dataset.agreed;
  if (form.dataset.inline) {
    event.preventDefault();
    await submitInline(form, event.submitter);
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
  if (event.target.matches("input[type=file]")) preview(event.target);
});

for (const zone of document.querySelectorAll(".drop")) {
  const input = zone.querySelector("input[type=file]");
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    const files = new DataTransfer();
    for (const file of [...event.dataTransfer.files].slice(0, input.multiple ? Infinity : 1)) files.items.add(file);
    input.files = files.files;
    preview(input);
  });
}
