// Curves that can be read, images of the step that was chosen, and nothing that a poll undoes.
"use strict";

document.addEventListener("pointermove", (event) => {
  const area = event.target.closest?.(".area");
  if (!area) return;
  const chart = area.closest(".chart"), box = area.getBoundingClientRect();
  const percent = ((event.clientX - box.left) / box.width) * 100;
  const points = (chart.points ??= JSON.parse(chart.dataset.readout));
  const [at, text] = points.reduce((best, point) => (Math.abs(point[0] - percent) < Math.abs(best[0] - percent) ? point : best));
  const cursor = area.querySelector(".cursor");
  cursor.style.left = `${at}%`;
  cursor.hidden = false;
  chart.querySelector("output").value = text;
});

// The step that each slider shows; one at its end stays there while rounds are added.
const chosen = new Map();

function showRound(slider) {
  const rounds = [...slider.closest(".prompt").querySelectorAll(".round")];
  rounds.forEach((round, index) => { round.hidden = index !== Number(slider.value); });
  const text = Number(rounds[slider.value].dataset.step).toLocaleString("en");
  slider.parentElement.querySelector("output").value = text;
  slider.setAttribute("aria-valuetext", `step ${text}`);
}

function showRounds() {
  for (const slider of document.querySelectorAll(".slider input")) {
    const rounds = [...slider.closest(".prompt").querySelectorAll(".round")];
    const index = rounds.findIndex((round) => round.dataset.step === chosen.get(slider.id));
    slider.value = index < 0 ? rounds.length - 1 : index;
    slider.parentElement.hidden = false;
    showRound(slider);
  }
}

document.addEventListener("input", (event) => {
  if (!event.target.matches(".slider input")) return;
  const slider = event.target, rounds = slider.closest(".prompt").querySelectorAll(".round");
  if (slider.value === slider.max) chosen.delete(slider.id);
  else chosen.set(slider.id, rounds[slider.value].dataset.step);
  showRound(slider);
});

// What is open stays open, and what is scrolled stays where it is.
let opened = [], scrolled = [];
document.addEventListener("htmx:oobBeforeSwap", (event) => {
  const old = event.detail.target;
  opened = [...old.querySelectorAll("details[open][id]")].map((each) => each.id);
  scrolled = [...old.querySelectorAll("details[open][id] :is(pre, .strip)")].map((each) => [each.closest("details").id, each.scrollLeft, each.scrollTop]);
});
document.addEventListener("htmx:oobAfterSwap", () => {
  for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
  for (const [id, left, top] of scrolled) document.getElementById(id)?.querySelector("pre, .strip")?.scrollTo(left, top);
  [opened, scrolled] = [[], []];
  showRounds();
});
showRounds();
