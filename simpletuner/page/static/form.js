// The form of settings: what is typed goes along from view to view, lists have rows, and texts with known values a select.
"use strict";

// Another view is another page: what was typed goes there by way of this tab's storage, and is taken out at once.
const CARRIED = "simpletuner-changes";
const form = () => document.querySelector("form[data-changes]");
const fileOf = (url) => new URL(url, location.href).searchParams.get("file");

function carryChanges() {
  const changed = controlsOf(form()).filter(isChanged).map((control) => [control.name, control.value]);
  if (!changed.length) return;
  sessionStorage.setItem(CARRIED, JSON.stringify({ file: fileOf(location.href), changed }));
  discards = true;
}

function goToView(url, replaces) {
  carryChanges();
  if (replaces) location.replace(url);
  else location.assign(url);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey || !form()) return;
  const url = new URL(link.href);
  const isSamePage = url.pathname === location.pathname && url.search === location.search;
  if (link.dataset.discards !== undefined || isSamePage || url.pathname !== location.pathname) return;
  if (fileOf(url) !== fileOf(location.href)) return;
  event.preventDefault();
  goToView(url.href, false);
});

// Put a value into the form as if it had been typed; a setting that this view does not show gets a field of its own.
function setSetting(name, value) {
  let control = document.getElementById(`f-${name}`);
  if (!control) {
    const field = document.createElement("div");
    field.className = "field";
    field.id = `setting-${name}`;
    field.dataset.search = name;
    const label = document.createElement("label");
    label.htmlFor = `f-${name}`;
    label.textContent = name;
    control = document.createElement(value.includes("\n") ? "textarea" : "input");
    Object.assign(control, { id: `f-${name}`, name, spellcheck: false });
    const undo = document.createElement("button");
    Object.assign(undo, { type: "button", textContent: "Undo" });
    undo.setAttribute("aria-label", `Undo the change of ${name}`);
    undo.addEventListener("click", () => {
      // It stays, out of sight: a check that is on its way brings a note for it.
      field.className = "";
      field.hidden = true;
      control.value = "";
      delete control.dataset.carried;
      field.parentElement.hidden = !field.parentElement.querySelector(".field");
      form().dispatchEvent(new Event("check"));
      countChanges();
    });
    const side = document.createElement("div");
    side.className = "control";
    side.append(control, undo);
    const both = document.createElement("div"), note = document.createElement("div");
    Object.assign(note, { className: "note", id: `note-${name}` });
    both.append(side, note);
    field.append(label, both);
    document.getElementById("carried").append(field);
  }
  const carried = control.closest("#carried");
  if (carried) {
    carried.hidden = false;
    document.getElementById(`setting-${name}`).hidden = false;
    document.getElementById(`setting-${name}`).className = "field";
    control.dataset.carried = "";
  }
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  return control;
}

window.addEventListener("load", () => {
  const kept = JSON.parse(sessionStorage.getItem(CARRIED) ?? "null");
  sessionStorage.removeItem(CARRIED);
  if (kept?.file !== fileOf(location.href)) return;
  for (const [name, value] of kept.changed) setSetting(name, value);
});

// A link to a setting that this view does not show leads to all settings.
function findTarget() {
  const view = form()?.elements.view.value;
  if (!location.hash.startsWith("#setting-") || document.getElementById(location.hash.slice(1)) || view === "all") return;
  const url = new URL(location.href);
  url.searchParams.set("view", "all");
  goToView(url.href, true);
}
window.addEventListener("hashchange", findTarget);
findTarget();

document.addEventListener("input", (event) => {
  const link = document.querySelector("[data-search-all]");
  if (!link || !event.target.matches("[data-filter]")) return;
  const url = new URL(link.href);
  url.searchParams.set("q", event.target.value);
  link.href = url.href;
});

// The items of a list as it is typed: one line each, or as JSON.
function itemsOf(text) {
  try {
    if (text.trimStart().startsWith("[")) return JSON.parse(text);
  } catch {
    // Then it is no JSON, and a mistake will say so.
  }
  return text.split("\n").filter((line) => line.trim());
}

// A list of texts, one row each; without scripts it is the text field that is below it, one line each.
function makeRows(area) {
  if (area.nextElementSibling?.classList.contains("rows") || itemsOf(area.value).some((each) => typeof each !== "string" || each.includes("\n"))) return;
  const word = area.dataset.lines, box = document.createElement("div"), add = document.createElement("button");
  box.className = "rows";
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", area.name);
  Object.assign(add, { type: "button", textContent: `Add a ${word}` });
  const rows = () => [...box.querySelectorAll("textarea")];
  const texts = () => rows().map((row) => row.value).filter((text) => text.trim());
  // A line that begins as a JSON list does would be read as one.
  const written = () => (texts()[0]?.trimStart().startsWith("[") ? JSON.stringify(texts()) : texts().join("\n"));
  const number = () => rows().forEach((row, index) => {
    row.setAttribute("aria-label", `${word} ${index + 1}`);
    row.nextElementSibling.setAttribute("aria-label", `Remove ${word} ${index + 1}`);
  });
  const tell = () => {
    area.value = written();
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const insert = (text, after) => {
    const line = document.createElement("div"), row = document.createElement("textarea"), remove = document.createElement("button");
    line.className = "line";
    Object.assign(row, { rows: Math.max(1, Math.ceil(text.length / 48)), value: text, spellcheck: true });
    Object.assign(remove, { type: "button", className: "close", textContent: "×" });
    row.addEventListener("input", () => {
      const [first, ...rest] = row.value.split("\n");  // pasted lines are rows
      if (rest.length) row.value = first;
      let last = line;
      for (const each of rest.filter((each) => each.trim())) last = insert(each, last);
      area.value = written();
    });
    row.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      insert("", line).querySelector("textarea").focus();
    });
    remove.addEventListener("click", () => {
      const next = line.nextElementSibling?.querySelector("textarea") ?? line.previousElementSibling?.querySelector("textarea");
      line.remove();
      number();
      tell();
      (next ?? add).focus();
    });
    line.append(row, remove);
    if (after) after.after(line);
    else box.insertBefore(line, add);
    number();
    return line;
  };
  const fill = () => {
    for (const line of box.querySelectorAll(".line")) line.remove();
    for (const text of itemsOf(area.value)) insert(text);
  };
  area.addEventListener("input", () => area.value !== written() && fill());
  add.addEventListener("click", () => insert("").querySelector("textarea").focus());
  box.append(add);
  fill();
  area.hidden = true;
  area.after(box);
}

// A text whose usual values are known is a select; its last choice shows the text field, for any other value.
function makeSelect(input) {
  if (input.previousElementSibling?.matches("select")) return;
  const select = document.createElement("select"), label = document.querySelector(`label[for="${input.id}"]`);
  const known = [...input.list.options].map((option) => option.value);
  const options = [["", input.placeholder ? `not set (${input.placeholder})` : "not set"], ...known.map((each) => [each, each]), ["other", "another value"]];
  for (const [value, text] of options) select.append(new Option(text, value));
  select.id = `choose-${input.name}`;
  select.disabled = input.disabled;
  select.setAttribute("aria-describedby", input.getAttribute("aria-describedby"));
  input.setAttribute("aria-label", `another value of ${label.textContent.trim()}`);
  label.htmlFor = select.id;
  const show = () => {
    const isKnown = input.value === "" || known.includes(input.value);
    if (!isKnown || document.activeElement !== input) select.value = isKnown ? input.value : "other";
    input.hidden = isKnown && document.activeElement !== input;
  };
  input.addEventListener("input", show);
  select.addEventListener("change", () => {
    if (select.value === "other") {
      input.hidden = false;
      input.focus();
      return;
    }
    input.value = select.value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  input.before(select);
  show();
}

document.addEventListener("htmx:load", (event) => {
  for (const area of event.target.querySelectorAll("textarea[data-lines]")) makeRows(area);
  for (const input of event.target.querySelectorAll(".fields input[list]")) makeSelect(input);
});
