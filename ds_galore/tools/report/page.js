"use strict";
// Draws the figures of a report: unpacks plotly, puts the scheme's colours in, and redraws when the scheme changes.
(async () => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const hidden = new Set();
  const drawn = new Set();

  const load = async () => {
    const text = document.getElementById("plotly").textContent;
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const colour = (role, theme) => {
    const [name, percent] = role.slice(1).split("/");
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(theme[name].slice(at, at + 2), 16));
    return `rgba(${red},${green},${blue},${percent === undefined ? 1 : percent / 100})`;
  };
  const DATA = new Set(["x", "y", "z", "text", "name", "ticktext", "tickvals"]);
  const themed = (value, theme, key = "") => {
    if (DATA.has(key)) return value;
    if (typeof value === "string") return /color$/.test(key) && value.startsWith("@") ? colour(value, theme) : value;
    if (Array.isArray(value)) return value.map((each) => themed(each, theme, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, themed(each, theme, name)]));
  };

  const draw = async (element) => {
    const figure = page.figures[element.dataset.figure];
    const theme = page.themes[dark.matches ? "dark" : "light"];
    const yaxis = figure.layout.yaxis ?? {};
    const layout = {
      ...figure.layout,
      template: page.template,
      height: figure.height,
      uirevision: yaxis.type ?? "linear",
      dragmode: touch.matches ? false : "zoom", // a finger on a figure scrolls the page
    };
    const data = figure.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta?.run) }));
    await Plotly.react(element, themed(data, theme), themed(layout, theme), {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch.matches || layout.showlegend ? false : "hover", // it would lie on the legend
      modeBarButtons: [["toImage", "resetScale2d"]],
    });
    drawn.add(element);
  };
  const redraw = async (wanted = () => true) => {
    for (const element of drawn) if (wanted(page.figures[element.dataset.figure])) await draw(element);
  };
  const shown = (element) => element.offsetParent !== null;
  const drawNew = async () => {
    for (const element of document.querySelectorAll("[data-figure]")) {
      if (drawn.has(element) || !shown(element)) continue;
      await draw(element);
      await new Promise((next) => setTimeout(next)); // so that the page stays alive meanwhile
    }
    document.documentElement.dataset.drawn = drawn.size;
  };
  const plot = (key) => document.querySelector(`[data-figure="${key}"]`);

  try {
    await load();
    await drawNew();
  } catch (error) {
    const alert = document.getElementById("alert");
    alert.textContent = `The figures cannot be drawn (${error.message}); a browser of 2023 or later can. Tables are below.`;
    alert.hidden = false;
    throw error;
  }
  dark.addEventListener("change", () => redraw());
  touch.addEventListener("change", () => redraw());
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", drawNew);
  for (const button of document.querySelectorAll("[data-log]")) {
    button.addEventListener("click", () => {
      const figure = page.figures[button.dataset.log];
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      figure.layout.yaxis = { ...figure.layout.yaxis, type: on ? "log" : "linear" };
      draw(plot(button.dataset.log));
    });
  }
  for (const select of document.querySelectorAll("[data-rows]")) {
    select.addEventListener("change", () => {
      const figure = page.figures[select.dataset.rows];
      Object.assign(figure.layout.yaxis, figure.rows[select.value]);
      draw(plot(select.dataset.rows));
    });
  }
  for (const chip of document.querySelectorAll("[data-run]")) {
    chip.addEventListener("click", () => {
      const run = Number(chip.dataset.run);
      const on = chip.getAttribute("aria-pressed") !== "true";
      chip.setAttribute("aria-pressed", String(on));
      if (on) hidden.delete(run);
      else hidden.add(run);
      redraw((figure) => figure.data.some((trace) => trace.meta !== undefined));
    });
  }
})();
