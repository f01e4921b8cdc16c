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

// Files are sent within a form: in base64, in letters that a form leaves as they are.
const asText = (file) => new Promise((done) => {
  const reader = new FileReader();
  reader.onloadend = () => done(reader.result?.split(",")[1]?.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "") ?? "");
  reader.readAsDataURL(file);
});

document.addEventListener("change", async (event) => {
  const chooser = event.target, name = chooser.dataset.sentAs, files = chooser.files;
  if (!name) return;
  const button = chooser.form.querySelector("button");
  button.disabled = true;
  const texts = await Promise.all([...files].map(asText));
  if (files !== chooser.files) return;  // others have been chosen meanwhile
  chooser.form.querySelectorAll(`input[type=hidden][name="${name}"]`).forEach((old) => old.remove());
  for (const text of texts) {
    const hidden = document.createElement("input");
    [hidden.type, hidden.name, hidden.value] = ["hidden", name, text];
    chooser.form.append(hidden);
  }
  button.disabled = false;
});

// The list of runs: search, states and order. Each poll brings all rows, those that were written last first.
const PER_PAGE = 25;
const choice = document.getElementById("choose-runs");
let shownRuns = PER_PAGE;

const ORDERS = {
  name: (one, other) => one.dataset.name.localeCompare(other.dataset.name, undefined, { numeric: true }),
  state: (one, other) => one.dataset.state.localeCompare(other.dataset.state),
  loss: (one, other) => (parseFloat(one.dataset.loss) || Infinity) - (parseFloat(other.dataset.loss) || Infinity) || 0,
};

function chooseRuns() {
  const body = document.querySelector("#live-rows tbody"), rows = [...(body?.rows ?? [])];
  choice.hidden = rows.length < 2;
  const [search, states, order] = choice.querySelectorAll("input, select");
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const isChosen = (row) => words.every((word) => row.textContent.toLowerCase().includes(word)) && (!states.value || states.value.split(" ").includes(row.dataset.state));
  if (order.value) body?.append(...rows.sort(ORDERS[order.value]));
  const chosen = rows.filter(isChosen);
  const visible = new Set(chosen.slice(0, shownRuns));
  for (const row of rows) row.hidden = !visible.has(row);
  choice.querySelector("output").value = chosen.length < rows.length ? `${chosen.length} of ${rows.length}` : `${rows.length} runs`;
  document.getElementById("more-runs").hidden = chosen.length <= shownRuns;
}

if (choice) {
  choice.addEventListener("submit", (event) => event.preventDefault());
  choice.addEventListener("input", () => {
    shownRuns = PER_PAGE;
    // Back in the order that the server gives, from which the others are made.
    if (!choice.querySelector("#runs-order").value) document.querySelector("#live-rows tbody")?.append(...given());
    chooseRuns();
  });
  document.getElementById("more-runs").addEventListener("click", () => {
    shownRuns = Infinity;
    chooseRuns();
  });
  document.addEventListener("htmx:oobAfterSwap", chooseRuns);
  chooseRuns();
}

function given() {
  const place = (row) => Number(row.querySelector("a[id]").id.replace("run-", ""));
  return [...document.querySelectorAll("#live-rows tbody tr")].sort((one, other) => place(one) - place(other));
}
