// What HTML and htmx cannot do by themselves. Nothing here knows a setting.
"use strict";

// The server was started again, and another tab has entered: what is typed here is sent again, by the new token.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { xhr, requestConfig } = event.detail;
  const token = xhr.status === 403 && xhr.getResponseHeader("X-CSRF-Token");
  if (!token || requestConfig.headers["X-CSRF-Token"] === token) return;
  event.detail.shouldSwap = false;
  document.body.setAttribute("hx-headers", JSON.stringify({ "X-CSRF-Token": token }));
  htmx.trigger(requestConfig.elt, requestConfig.triggeringEvent?.type ?? "click");
});

const SECONDS_OF_A_TOAST = 8;
const MOST_TOASTS = 3;

// Toasts: what went well goes by itself, while nobody points at it; a warning or an error stays.
new MutationObserver((changes) => {
  for (const change of changes) {
    for (const toast of change.addedNodes) {
      if (!(toast instanceof HTMLElement)) continue;
      if (toast.matches(".offer")) {
        // A second click on what has asked for it makes no second one.
        for (const older of document.querySelectorAll("#toasts > .offer")) if (older !== toast) older.remove();
      }
      for (const older of document.querySelectorAll("#toasts > .toast.error")) {
        if (older !== toast && older.textContent.trim() === toast.textContent.trim()) older.remove();
      }
      // Several would lie over what is edited next.
      for (const older of document.querySelectorAll(`#toasts > [data-once="${toast.dataset.once}"]`)) if (older !== toast) older.remove();
      if (!toast.classList.contains("done")) continue;
      const leave = () => (toast.matches(":hover, :focus-within") ? setTimeout(leave, 1000) : toast.remove());
      setTimeout(leave, SECONDS_OF_A_TOAST * 1000);
    }
  }
  const shown = document.querySelectorAll("#toasts > .toast");
  for (const old of [...shown].slice(0, -MOST_TOASTS)) old.remove();
}).observe(document.getElementById("toasts"), { childList: true });

// Who has asked for what is swapped in goes on there: in a caption's field, on its cell, on an offer's first button.
// htmx binds them 20 ms after they are inserted: a key before that would do nothing. Not `autofocus`: htmx focuses what
// has it, too, and Chromium, which draws before or after that, then says that it was blocked.
document.addEventListener("htmx:load", (event) => {
  event.target.querySelector("[data-focus]")?.focus();
});

document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) event.target.closest?.(".offer")?.remove();
});

function showToast(text, hint) {
  const toast = document.createElement("div");
  toast.className = "toast error";
  for (const [name, line] of [["whole", text], ["hint", hint]]) {
    const paragraph = document.createElement("p");
    paragraph.className = name;
    paragraph.textContent = line;
    toast.append(paragraph);
  }
  document.getElementById("toasts").append(toast);
}

document.addEventListener("htmx:sendError", () => {
  const shown = [...document.querySelectorAll("#toasts .whole")].some((line) => line.dataset.offline);
  if (shown) return;
  showToast("The page's server does not answer.", "Is `simpletuner page` still running? What you typed is still here.");
  document.querySelector("#toasts > :last-child .whole").dataset.offline = "yes";
});

document.addEventListener("click", (event) => {
  const closer = event.target.closest("[data-close]");
  if (!closer) return;
  const closed = closer.closest(closer.dataset.close);
  if (closed instanceof HTMLDialogElement) closed.close();
  else closed.remove();
});

// Forms that send only what was changed. What a control had when the page was made, the browser itself remembers.
function isChanged(control) {
  if (control.dataset.carried !== undefined) return true;
  if (control instanceof HTMLSelectElement) {
    const before = [...control.options].find((option) => option.defaultSelected) ?? control.options[0];
    return control.value !== before?.value;
  }
  return control.value !== control.defaultValue;
}

const controlsOf = (form) => [...form.querySelectorAll(".fields :is(input, select, textarea)")].filter((each) => each.name);

document.addEventListener("htmx:configRequest", (event) => {
  const form = document.querySelector("form[data-changes]");
  if (!form) return;
  for (const control of controlsOf(form)) if (!isChanged(control)) delete event.detail.parameters[control.name];
});

function countChanges() {
  const form = document.querySelector("form[data-changes]");
  const count = form ? controlsOf(form).filter(isChanged).length : 0;
  const shown = document.getElementById("changed");
  if (shown) {
    shown.hidden = count === 0;
    shown.textContent = count;
    shown.title = `${count} not saved`;
  }
  const start = form?.querySelector("#start");
  if (start) {
    start.disabled = count > 0;
    start.title = count > 0 ? "save first: a run reads the file" : "";
    document.getElementById("why-no-start").hidden = count === 0;  // a phone shows no title
  }
  return count;
}

document.addEventListener("input", (event) => {
  if (event.target.closest("form[data-changes]")) countChanges();
});

let discards = false;
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-discards]")) discards = true;
});
window.addEventListener("beforeunload", (event) => {
  if (countChanges() > 0 && !discards) event.preventDefault();
});

// Mistakes are text beside a field; assistive technology wants to know which field they are about, too.
document.addEventListener("htmx:afterSettle", () => {
  for (const note of document.querySelectorAll(".note")) {
    const control = document.getElementById(note.id.replace(/^note-/, "f-"));
    if (control) control.setAttribute("aria-invalid", note.querySelector(".mistake") ? "true" : "false");
  }
  countChanges();
  filterFields();
});

// Search: fields that do not have all words are hidden. The address keeps the words, for reload and back.
function filterFields() {
  const search = document.querySelector("[data-filter]");
  if (!search) return;
  const plain = (text) => text.toLowerCase().replaceAll(/[-_]/g, "");  // warm-up is lr_warmup_steps, too
  const words = plain(search.value).split(/\s+/).filter(Boolean);
  let found = 0;
  for (const field of document.querySelectorAll(search.dataset.filter)) {
    const text = plain(field.dataset.search);
    field.hidden = !words.every((word) => text.includes(word));
    found += !field.hidden;
  }
  for (const section of document.querySelectorAll(".fields > section")) {
    section.hidden = !section.querySelector(`${search.dataset.filter}:not([hidden])`);
  }
  document.getElementById("nothing-found").hidden = found > 0;
  const address = new URL(location.href);
  if (search.value) address.searchParams.set("q", search.value);
  else address.searchParams.delete("q");
  if (address.href !== location.href) history.replaceState(history.state, "", address);
}

document.addEventListener("input", (event) => {
  if (event.target.matches("[data-filter]")) filterFields();
});
document.addEventListener("keydown", (event) => {
  const search = document.querySelector("[data-filter]");
  if (!search) return;
  if (event.target === search && event.key === "Enter") event.preventDefault();
  if (event.key === "/" && !event.target.matches("input, select, textarea") && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    search.focus();
  }
});

// A link to a setting that the search hides shows all settings again.
function showTarget() {
  const target = document.getElementById(location.hash.slice(1));
  const search = document.querySelector("[data-filter]");
  if (!target || !search) return;
  if (target.closest("[hidden]")) {
    search.value = "";
    filterFields();
  }
  target.scrollIntoView();
  target.querySelector("input, select, textarea")?.focus({ preventScroll: true });
}
window.addEventListener("hashchange", showTarget);
window.addEventListener("load", showTarget);
filterFields();

// Dialogs. Toasts move into the one that is open: everything outside of it is inert, and silent.
const dialog = document.getElementById("dialog");
if (dialog) {
  const toasts = document.getElementById("toasts");
  const content = document.getElementById("dialog-content");
  // Not at afterSwap: until it has settled, htmx does not listen to what is in it.
  document.addEventListener("htmx:afterSettle", (event) => {
    // Nothing was swapped in where the answer is an error, which is a toast.
    if (event.target !== content || dialog.open || !content.childElementCount) return;
    dialog.showModal();
    dialog.append(toasts);
  });
  dialog.addEventListener("close", () => {
    document.body.append(toasts);
    content.replaceChildren();
  });
}

// What a dialog has chosen goes into a field of the form, as if it had been typed.
function fillField(name, value) {
  const control = document.getElementById(`f-${name}`);
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  dialog?.close();
  control.focus();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-fill]");
  if (!button) return;
  const chosen = [...dialog.querySelectorAll("input[name=selected]:checked")].map((box) => box.value).join(",");
  fillField(button.dataset.fill, button.dataset.value ?? chosen);
});
document.addEventListener("attend", (event) => {
  const target = document.getElementById(event.detail.id);
  target.scrollIntoView();
  target.focus({ preventScroll: true });
});
document.addEventListener("fill", (event) => fillField(event.detail.name, event.detail.value));

// Forms that show something else as soon as a choice is made; without scripts their button does it.
for (const form of document.querySelectorAll("form[data-sends-itself]")) {
  form.addEventListener("change", () => form.requestSubmit());
  form.querySelector("button").hidden = true;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.querySelector(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    // Without https, other machines' browsers have no clipboard for a page: the text is selected instead.
    getSelection().selectAllChildren(source);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
});

// How long something has been running that says nothing of its progress.
setInterval(() => {
  for (const clock of document.querySelectorAll("[data-clock]")) {
    if (clock.offsetParent === null) delete clock.dataset.since;
    else clock.dataset.since ??= Date.now();
    clock.textContent = clock.dataset.since ? `· ${Math.round((Date.now() - clock.dataset.since) / 1000)} s` : "";
  }
}, 500);

// How long ago something was; before yesterday the date, in this browser's own zone.
function showTimes() {
  for (const time of document.querySelectorAll("time")) {
    const then = new Date(time.dateTime), seconds = Math.max(0, (Date.now() - then) / 1000);
    const [size, unit] = seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : [3600, "h"];
    time.title = then.toLocaleString();
    const text = seconds < 86400 ? `${Math.floor(seconds / size)} ${unit} ago` : then.toLocaleString();
    if (time.textContent !== text) time.textContent = text;  // what is selected stays so
  }
}
showTimes();
setInterval(showTimes, 1000);
document.addEventListener("htmx:afterSettle", showTimes);
