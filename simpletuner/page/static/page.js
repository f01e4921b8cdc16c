// What HTML and htmx cannot do by themselves. Nothing here knows a setting.
"use strict";

const SECONDS_OF_A_TOAST = 8;

// Toasts: what went well goes by itself, while nobody points at it; a warning or an error stays.
new MutationObserver((changes) => {
  for (const change of changes) {
    for (const toast of change.addedNodes) {
      if (!(toast instanceof HTMLElement) || !toast.classList.contains("done")) continue;
      const leave = () => (toast.matches(":hover, :focus-within") ? setTimeout(leave, 1000) : toast.remove());
      setTimeout(leave, SECONDS_OF_A_TOAST * 1000);
    }
  }
}).observe(document.getElementById("toasts"), { childList: true });

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
