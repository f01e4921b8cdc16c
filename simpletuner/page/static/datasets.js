// Keys in the form of a caption, which htmx could only bind by evaluating text.
"use strict";

document.addEventListener("keydown", (event) => {
  const form = event.target.closest?.("form[data-caption]");
  if (!form) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape") {
    form.querySelector("[data-cancel]").click();
  }
});

// A toast that was answered goes. Not at the click: htmx sends nothing, and tells nobody, for what is not in the page.
document.addEventListener("htmx:afterOnLoad", (event) => event.detail.elt.closest(".toast")?.remove());
