"use strict";
document.documentElement.classList.add("scripted-page");
for (const slider of document.querySelectorAll(".scripted")) slider.hidden = false;

for (const prompt of document.querySelectorAll(".prompt")) {
  const slider = prompt.querySelector("input");
  const rounds = [...prompt.querySelectorAll(".round[data-step]")];
  const show = () => {
    rounds.forEach((round, index) => { round.hidden = index !== Number(slider.value); });
    const chosen = rounds[slider.value];
    prompt.querySelector("output").value = chosen ? Number(chosen.dataset.step).toLocaleString("en") : "";
  };
  slider.addEventListener("input", show);
  slider.parentElement.hidden = rounds.length < 2;
  show();
}

const all = document.getElementById("all");
if (all) {
  all.addEventListener("input", () => {
    for (const slider of document.querySelectorAll(".prompt input")) {
      slider.value = Math.round(all.value / all.max * slider.max);
      slider.dispatchEvent(new Event("input"));
    }
  });
  all.parentElement.hidden = document.querySelectorAll(".prompt").length < 2;
}

for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.dataset.readout);
  const area = chart.querySelector(".area"), cursor = chart.querySelector(".cursor");
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect(), percent = (event.clientX - box.left) / box.width * 100;
    const [at, text] = points.reduce((best, point) =>
      Math.abs(point[0] - percent) < Math.abs(best[0] - percent) ? point : best);
    cursor.style.left = at + "%";
    cursor.hidden = false;
    chart.querySelector("output").value = text;
  });
}
