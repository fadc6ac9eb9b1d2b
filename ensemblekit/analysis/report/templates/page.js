"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const right = event.clientX + tip.offsetWidth + 20 > window.innerWidth;
    tip.style.left = Math.max(4, event.clientX + (right ? -tip.offsetWidth - 10 : 12)) + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 8) + "px";
  };
  const cell = (table, row, column) => {
    const line = table.tBodies[0].rows[row];
    if (!line || !line.cells[column]) return "";
    const head = table.tHead.rows[0].cells;
    return line.cells[0].textContent + ", " + head[column].textContent + ": " + line.cells[column].textContent;
  };
  const labelled = (table, row, column) => {
    const head = table.tHead.rows[0].cells[0].textContent;
    return (head && table.classList.contains("rows") ? head + " " : "") + cell(table, row, column);
  };
  const matrixText = (image, table, event) => {
    const box = image.getBoundingClientRect(), count = table.tBodies[0].rows.length;
    const at = (value, start, size) => Math.min(count - 1, Math.max(0, Math.floor((value - start) / size * count)));
    return cell(table, at(event.clientY, box.top, box.height), at(event.clientX, box.left, box.width) + 1);
  };
  for (const chart of document.querySelectorAll("figure.chart")) {
    const table = chart.querySelector("table"), svg = chart.querySelector("svg");
    if (!table || !svg) continue;
    for (const line of svg.querySelectorAll("[data-column]")) {
      const rows = line.dataset.rows ? line.dataset.rows.split(".") : null;
      line.querySelectorAll("use").forEach((mark, index) => {
        mark.dataset.cell = (rows ? rows[index] : index) + "-" + line.dataset.column;
      });
    }
    svg.addEventListener("pointermove", event => {
      const mark = event.target.closest("[data-cell]");
      const image = table.classList.contains("matrix") && event.target.closest("image");
      const text = mark ? labelled(table, ...mark.dataset.cell.split("-").map(Number))
        : image && image.getBoundingClientRect().width > 40 ? matrixText(image, table, event) : "";
      if (text) show(event, text); else tip.hidden = true;
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
  const lines = [...document.querySelectorAll("svg [data-member]")];
  const members = [...new Set(lines.map(line => line.dataset.member))].sort((a, b) => a - b);
  const section = members.length && lines[0].closest("section");
  if (!section) return;
  const box = document.createElement("fieldset");
  box.className = "members";
  box.append(Object.assign(document.createElement("legend"), { textContent: "Show members" }));
  const toggle = (label, change, checked) => {
    const input = Object.assign(document.createElement("input"), { type: "checkbox", checked });
    const text = document.createElement("label");
    text.append(input, " " + label);
    input.addEventListener("change", () => change(input.checked));
    box.append(text);
    return input;
  };
  const hide = (member, shown) => lines.forEach(line => { if (line.dataset.member === member) line.style.display = shown ? "" : "none"; });
  const inputs = [];
  toggle("all", shown => members.forEach((member, index) => { inputs[index].checked = shown; hide(member, shown); }), true);
  members.forEach(member => inputs.push(toggle(member, shown => hide(member, shown), true)));
  section.insertBefore(box, section.querySelector(".charts"));
})();
