// The teachers of each service: rate, queue, version, whom they serve; their students; how many are wanted and why.

import { TimeChart } from "./chart.js";
import { BoundedTable, MoreButton, element, nameElement, reconcile, setName, setNameCell, setNames, setText } from "./dom.js";
import { count, figure, percent, plural } from "./format.js";
import { WantedLine, setBadge } from "./parts.js";
import { lines } from "./series.js";

const CARDS_SHOWN = 20; // until "show all": each has two pictures

const column = (label, kind, set) => ({ label, kind, set });

export class ServicesView {
  constructor(section) {
    this._list = element("div", { class: "cards" });
    this._more = new MoreButton(CARDS_SHOWN, "services", () => this.update(this._state));
    section.append(this._list, this._more.root);
  }

  update(state) {
    const items = [...state.services].sort((left, right) => left.service.localeCompare(right.service))
      .map((service) => ({ service, now: state.time }));
    this._state = state;
    reconcile(this._list, this._more.shown(items), (item) => item.service.service, () => new ServiceCard());
  }
}

class ServiceCard {
  constructor() {
    this._name = nameElement();
    this._headline = element("p", { class: "headline" });
    this._wanted = new WantedLine("teacher");
    this._rate = new TimeChart({ title: "Throughput of all teachers, rows/s", unit: "rows/s", series: [{ label: "", colour: "--line" }] });
    this._number = new TimeChart({
      title: "Teachers: live (solid) and wanted (dashed)", unit: "",
      series: [
        { label: "live", colour: "--line", stepped: true },
        { label: "wanted", colour: "--line-second", stepped: true, dashed: true },
      ],
    });
    this._teachers = new BoundedTable("Teachers", [
      column("teacher", "heading", (cell, teacher) => setNameCell(cell, teacher.id, teacher.endpoint)),
      column("state", "word", (cell, teacher) => setBadge(cell, teacher.state)),
      column("rows/s", "number", (cell, teacher) => setText(cell, figure(teacher.rowsPerS))),
      column("queue, rows", "number", (cell, teacher) => setText(cell, count(teacher.queueRows))),
      column("busy", "number", (cell, teacher) => setText(cell, percent(teacher.computeShare))),
      column("model", "", (cell, teacher) => setNameCell(cell, teacher.model)),
      column("version", "", (cell, teacher) => setNameCell(cell, teacher.version)),
      column("serves", "wide", (cell, teacher) => setNames(cell, teacher.students)),
    ], (teacher) => teacher.id, { noun: "teachers" });
    this._students = new BoundedTable("Students", [
      column("student", "heading", (cell, student) => setNameCell(cell, student.id)),
      column("job", "", (cell, student) => setNameCell(cell, student.job)),
      column("rows/s", "number", (cell, student) => setText(cell, figure(student.rowsPerS))),
      column("waits", "number", (cell, student) => setText(cell, percent(student.waitShare))),
      column("served by", "wide", (cell, student) => setNames(cell, student.teachers)),
    ], (student) => student.id, { noun: "students" });
    this.root = element("article", { class: "card" },
      element("h3", {}, this._name), this._headline, this._wanted.root, this._teachers.root, this._students.root,
      element("div", { class: "charts" }, element("div", { class: "slot" }, this._rate.root), element("div", { class: "slot" }, this._number.root)));
  }

  update({ service, now }) {
    setName(this._name, service.service);
    setText(this._headline, headline(service));
    this._wanted.update(service.wanted, now);
    this._teachers.setCaption("Teachers");
    this._teachers.update(service.teachers);
    this._students.setCaption("Students");
    this._students.root.hidden = service.students.length === 0;
    this._students.update(service.students);
    this._rate.update(lines(service.history, [(point) => point.rowsPerS]));
    this._number.update(lines(service.history, [(point) => point.teachers, (point) => point.wanted]));
  }

  destroy() {
    this._rate.destroy();
    this._number.destroy();
  }
}

/** How many there are, without those whose lease ran out. */
export function liveTeachers(service) {
  return service.teachers.filter((teacher) => teacher.state !== "lapsed").length;
}

function headline(service) {
  const live = liveTeachers(service);
  const lapsed = service.teachers.length - live;
  const words = [`${plural(live, "teacher")} live`];
  if (lapsed > 0) words.push(`${count(lapsed)} lapsed`);
  words.push(plural(service.students.length, "student"));
  const rates = service.teachers.map((teacher) => teacher.rowsPerS).filter((value) => value !== null);
  if (rates.length > 0) words.push(`${figure(rates.reduce((left, right) => left + right, 0))} rows/s`);
  const waits = service.students.map((student) => student.waitShare).filter((value) => value !== null);
  if (waits.length > 0) words.push(`students wait ${percent(waits.reduce((left, right) => left + right, 0) / waits.length)} of their time`);
  return words.join(" · ");
}
