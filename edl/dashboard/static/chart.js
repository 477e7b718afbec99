// Pictures over time, drawn by uPlot: lines, steps, or bands upon one another; marks where something happened.

import uPlot from "./vendor/uPlot.esm.js";
import { element, setText } from "./dom.js";
import { figure, fullTime, tick, time } from "./format.js";
import { extent } from "./series.js";

const HEIGHT = 170; // pixels, of every picture: updates never move what is below
const MARK_REACH = 6; // pixels: as near as a finger or a mouse hits a mark
const charts = new Set();

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.redraw();
});

function colour(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

export class TimeChart {
  /**
   * `series` are {label, colour (a CSS variable), dashed, stepped}; with `bands` they are parts that sum to `top`, the
   * first at the bottom. `unit` follows a figure. `top` is the end of the scale where it is known.
   */
  constructor({ title, unit, series, bands = false, top = null }) {
    this._title = title;
    this._unit = unit;
    this._series = series;
    this._bands = bands;
    this._top = top;
    this._data = null;
    this._marks = [];
    this._plot = null;
    this._readout = element("p", { class: "readout" });
    this._canvas = element("div", { class: "canvas", role: "img", "aria-label": `${title}: no figures yet` });
    this._none = element("p", { class: "none" }, "No figures yet");
    this.root = element("figure", { class: "chart" },
      element("figcaption", {}, title), element("div", { class: "frame" }, this._canvas, this._none), this._readout);
    this._observer = new ResizeObserver(() => this._fit());
    this._observer.observe(this._canvas);
    charts.add(this);
  }

  destroy() {
    this._observer.disconnect();
    this._plot?.destroy();
    charts.delete(this);
  }

  /** Draw other figures. `marks` are {t, text, bad}. */
  update({ times, columns }, marks = []) {
    this._marks = marks;
    const known = columns.some((column) => column.some((value) => value !== null)) && times.length > 1;
    this._none.hidden = known;
    this._data = known ? [times, ...columns] : null;
    this._canvas.setAttribute("aria-label", this._described());
    if (!known) {
      this._plot?.destroy();
      this._plot = null;
      setText(this._readout, "");
      return;
    }
    if (this._plot === null) this._fit();
    else this._plot.setData(this._ordered());
    if (this._plot !== null && this._plot.cursor.idx == null) this._say(null);
  }

  redraw() {
    this._plot?.destroy();
    this._plot = null;
    this._fit();
  }

  /** Bands are drawn from the topmost on, so that the lower ones cover what they share. */
  _ordered() {
    return this._bands ? [this._data[0], ...this._data.slice(1).reverse()] : this._data;
  }

  _fit() {
    const width = Math.floor(this._canvas.clientWidth);
    if (width < 40 || this._data === null) return; // hidden at present
    if (this._plot === null) this._plot = new uPlot(this._options(width), this._ordered(), this._canvas);
    else if (this._plot.width !== width) this._plot.setSize({ width, height: HEIGHT });
  }

  _options(width) {
    const [text, grid] = [colour("--text-soft"), colour("--grid")];
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const drawn = this._series.map((part) => {
      const shade = colour(part.colour);
      return {
        label: part.label,
        stroke: this._bands ? undefined : shade,
        width: this._bands ? 0 : 2,
        dash: part.dashed ? [6, 4] : undefined,
        fill: this._bands ? shade : undefined,
        points: { show: false },
        paths: this._bands || part.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      };
    });
    if (this._bands) drawn.reverse();
    return {
      width,
      height: HEIGHT,
      padding: [8, 28, 0, 0], // the last time is written beyond the picture's edge
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { show: !this._bands } },
      select: { show: false },
      scales: { y: { range: (_, low, high) => [0, this._top ?? (high > 0 ? high * 1.1 : 1)] } },
      axes: [
        { ...axis, space: 70, size: 28, values: (_, ticks, __, ___, step) => ticks.map((moment) => tick(moment, step)) },
        { ...axis, size: 54, values: (_, ticks) => ticks.map((value) => figure(value) + (this._unit === "%" ? "%" : "")) },
      ],
      series: [{}, ...drawn],
      hooks: {
        setCursor: [(plot) => this._say(plot.cursor.idx ?? null)],
        draw: [(plot) => this._drawMarks(plot)],
      },
    };
  }

  _drawMarks(plot) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio;
    ctx.save();
    for (const mark of this._marks) {
      const x = plot.valToPos(mark.t, "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(mark.bad ? "--bad" : "--text-soft");
      ctx.lineWidth = scale;
      ctx.setLineDash([3 * scale, 3 * scale]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x - 4 * scale, bbox.top);
      ctx.lineTo(x + 4 * scale, bbox.top);
      ctx.lineTo(x, bbox.top + 7 * scale);
      ctx.fill();
    }
    ctx.restore();
  }

  /** Say in words what is under the cursor; without a cursor, the newest figures. */
  _say(index) {
    if (this._data === null || this._plot === null) return;
    const [times, ...columns] = this._data;
    const place = index ?? (this._bands ? Math.max(0, times.length - 2) : times.length - 1);
    const figures = this._series
      .map((part, number) => [part.label, this._value(columns, number, place)])
      .filter(([, value]) => value !== null && !(this._bands && value < 0.05))
      .map(([label, value]) => `${label} ${figure(value)}${this._unit === "%" ? "%" : ` ${this._unit}`.trimEnd()}`);
    const mark = index === null ? undefined : this._marks.find((each) =>
      Math.abs(this._plot.valToPos(each.t, "x") - this._plot.cursor.left) <= MARK_REACH);
    const parts = [time(times[place], times[times.length - 1]), figures.join(", ") || "nothing known", mark?.text];
    setText(this._readout, parts.filter(Boolean).join(" · "));
    const title = fullTime(times[place]);
    if (this._readout.title !== title) this._readout.title = title;
  }

  _value(columns, number, place) {
    const value = columns[number][place] ?? null;
    if (value === null || !this._bands || number === 0) return value;
    return value - columns[number - 1][place];
  }

  _described() {
    if (this._data === null) return `${this._title}: no figures yet`;
    const [times, ...columns] = this._data;
    const span = `from ${time(times[0], null)} to ${time(times[times.length - 1], null)}`;
    if (this._bands) return `${this._title}, ${span}; the shares are listed in the text`;
    const told = this._series.map((part, number) => {
      const known = extent(columns[number]);
      if (known === null) return `${part.label} unknown`;
      return `${part.label} now ${figure(known.last)} ${this._unit}, between ${figure(known.low)} and ${figure(known.high)}`;
    });
    return `${this._title}, ${span}: ${told.join("; ")}`;
  }
}
