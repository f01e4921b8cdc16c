"use strict";
for (const element of document.querySelectorAll(".scripted")) element.hidden = false;

const imagesIn = (cell) => [...cell.querySelectorAll(".image a")];
const titleOf = (head) => head.querySelector("h3").textContent;

const grid = document.querySelector(".grid table");
if (grid) {
  const viewer = document.getElementById("viewer"), large = viewer.insertBefore(new Image(), viewer.firstChild);
  const rows = [...grid.tBodies[0].rows], heads = [...grid.tHead.rows[0].cells];
  let at = null;

  const show = (link) => {
    const cell = link.closest("td"), row = cell.parentElement, image = link.querySelector("img");
    at = { row: rows.indexOf(row), column: cell.cellIndex, index: imagesIn(cell).indexOf(link) };
    large.src = image.src;
    large.alt = image.alt;
    large.className = image.className;
    large.style.setProperty("--ratio", image.width / image.height);
    const label = link.nextElementSibling.textContent;
    viewer.querySelector(".caption").textContent =
      `${titleOf(heads[at.column])} · ${titleOf(row.cells[0])} · ${label}`;
    viewer.querySelector("a").href = link.href;
    if (!viewer.open) viewer.showModal();
  };
  const across = (by) => {
    const links = imagesIn(rows[at.row]);
    const next = links[links.indexOf(imagesIn(rows[at.row].cells[at.column])[at.index]) + by];
    if (next) show(next);
  };
  const down = (by) => {
    for (let row = at.row + by; rows[row]; row += by) {
      const links = imagesIn(rows[row].cells[at.column]);
      if (links.length) return show(links[Math.min(at.index, links.length - 1)]);
    }
  };
  grid.addEventListener("click", (event) => {
    const link = event.target.closest(".image a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    show(link);
  });
  const moves = { ArrowLeft: () => across(-1), ArrowRight: () => across(1), ArrowUp: () => down(-1), ArrowDown: () => down(1) };
  viewer.addEventListener("keydown", (event) => {
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });
  viewer.addEventListener("click", (event) => {
    if (event.target === viewer) viewer.close();
    moves[event.target.dataset.key]?.();
  });

  const wipe = document.getElementById("wipe");
  if (wipe) {
    const select = wipe.querySelector("select"), slider = wipe.querySelector("input");
    const [after, before] = ["after", "before"].map((name) => Object.assign(new Image(), { alt: `${name} training` }));
    before.className = "before";
    wipe.querySelector(".layers").prepend(after, before);
    const pairs = [];
    heads.slice(1).forEach((head, index) => {
      const shown = rows.map((row) => imagesIn(row.cells[index + 1])).filter((links) => links.length);
      if (shown.length < 2) return;
      pairs.push([shown[0][0], shown[shown.length - 1].at(-1)].map((link) => link.querySelector("img")));
      select.add(new Option(titleOf(head)));
    });
    const choose = () => [before, after].forEach((layer, index) => {
      const image = pairs[select.selectedIndex][index];
      layer.src = image.src;
      layer.classList.toggle("small", image.classList.contains("small"));
    });
    const slide = () => wipe.style.setProperty("--at", `${slider.value}%`);
    wipe.hidden = !pairs.length;
    select.addEventListener("change", choose);
    slider.addEventListener("input", slide);
    if (pairs.length) choose();
    slide();
  }
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
