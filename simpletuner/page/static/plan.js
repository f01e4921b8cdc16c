// The plan beside the form: it starts by itself after a pause in typing, and an old one says that it is old.
"use strict";

const PAUSE_MS = 1200;
const REMEMBERED = "simpletuner-plan";
const planBox = () => document.getElementById("plan");
let edits = 0, askedAt = 0, pause = 0;

const isLive = () => document.getElementById("plan-live")?.checked;
const hasPlan = () => document.querySelector("#plan-result :is(.notice, table)") !== null;

function markOutdated() {
  const isOld = hasPlan() && edits !== askedAt;
  document.getElementById("plan-outdated").hidden = !isOld;
  document.getElementById("plan-result").classList.toggle("outdated", isOld);
}

function planSoon() {
  clearTimeout(pause);
  if (isLive()) pause = setTimeout(() => document.getElementById("plan-result").dispatchEvent(new Event("plan")), PAUSE_MS);
}

document.addEventListener("input", (event) => {
  if (!planBox() || event.target.type === "checkbox" && event.target.id !== "plan-live") return;
  if (event.target.closest("#plan")) {
    const [gpu, memory] = ["plan-gpu", "plan-memory"].map((id) => document.getElementById(id).value);
    localStorage.setItem(REMEMBERED, JSON.stringify({ gpu, memory, live: isLive() }));
  } else if (!event.target.closest(".fields")) return;
  edits += event.target.id !== "plan-live";
  markOutdated();
  planSoon();
});

// The one that is asked for now is that of the form as it is now, whatever is typed while it is counted.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (event.detail.pathInfo.requestPath !== "/plan") return;
  clearTimeout(pause);
  event.detail.xhr.edits = edits;
});
document.addEventListener("htmx:afterSwap", (event) => {
  if (event.target.id !== "plan-result") return;
  askedAt = event.detail.xhr.edits;
  markOutdated();
  if (event.detail.requestConfig.elt.matches("button")) event.target.scrollIntoView({ block: "nearest" });
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-take]");
  if (!button) return;
  const wasNew = edits === askedAt;
  for (const [name, value] of Object.entries(JSON.parse(button.dataset.take))) setSetting(name, value);
  if (wasNew) {  // the plan is that of the form as it is now
    clearTimeout(pause);
    askedAt = edits;
    markOutdated();
  }
  document.querySelector("#carried:not([hidden])")?.scrollIntoView();
});

if (planBox()) {
  planBox().open = innerWidth > 820;  // on a phone it is above the form
  const { gpu = "", memory = "", live = false } = JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}");
  document.getElementById("plan-gpu").value = gpu;
  document.getElementById("plan-memory").value = memory;
  document.getElementById("plan-live").checked = live;
  planSoon();
}
