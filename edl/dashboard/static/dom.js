// Makes and updates elements. Text from outside reaches the page as text nodes only, never as HTML.
// What does not belong here: what jobs, teachers and shards are.

const ROWS_SHOWN = 20; // of a table until "show all": more do not fit a screen, and cost time at each update
const NAMES_SHOWN = 3; // beside one another in a cell
const SHORT_NAME = 12; // characters: such a name is never broken, and all columns of a table still fit a small screen
const BREAKS = /(?<=[./_:@])/; // where a longer name is broken first

/** Return a new element; strings among the children become text nodes. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Change an element's text where it differs, so that a reader's selection survives an update. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setTitle(node, text) {
  if (text === "") node.removeAttribute("title");
  else if (node.title !== text) node.title = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

/** Return an element for a name from outside: isolated, since it may be written from right to left. */
export function nameElement(text = "") {
  const made = element("bdi", { class: "name", dir: "auto" });
  setName(made, text);
  return made;
}

/** Shorten names that `edl run` made, run-<32 hexadecimal digits>: eight digits tell jobs apart. */
export function shortName(text) {
  return text.replace(/\b(run-[0-9a-f]{8})[0-9a-f]{24}\b/g, "$1");
}

export function setName(node, text) {
  const short = shortName(text);
  node.classList.toggle("short", short.length <= SHORT_NAME && !/\s/.test(short));
  const shown = text.trim() === "" ? "(no name)" : short;
  if (node.textContent !== shown) {
    node.replaceChildren(...shown.split(BREAKS).flatMap((part, place) => (place > 0 ? [element("wbr"), part] : [part])));
  }
  setTitle(node, short === text ? "" : text);
}

/** Show a name, or another text from outside, in a table's cell. */
export function setNameCell(cell, text, title = "") {
  if (cell.firstChild === null) cell.append(nameElement());
  if (text.trim() === "" && cell.tagName === "TD") setText(cell.firstChild, "–");
  else setName(cell.firstChild, text);
  setTitle(cell, title);
}

const parts = new WeakMap(); // parent -> Map of key -> {root, update}

/**
 * Make a parent's children those of a list, with as few moves as possible: focus, selection and open details survive.
 *
 * `make(item)` returns {root, update(item)}, and optionally destroy(). What is made stays: `update` must take all that
 * changes from its item, and nothing from around `make`. Items of one key are told apart by their order.
 */
export function reconcile(parent, items, keyOf, make) {
  const before = parts.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    let key = keyOf(item);
    while (after.has(key)) key += "\u0000";
    after.set(key, item);
  }
  for (const [key, part] of before) {
    if (after.has(key)) continue;
    part.root.remove();
    part.destroy?.();
  }
  const kept = new Map();
  let place = parent.firstChild;
  for (const [key, item] of after) {
    const part = before.get(key) ?? make(item);
    part.update(item);
    if (part.root === place) place = place.nextSibling;
    else parent.insertBefore(part.root, place);
    kept.set(key, part);
  }
  parts.set(parent, kept);
}

/** A button that shows all of a list, or its first items again. */
export class MoreButton {
  constructor(limit, noun, onChange) {
    this._limit = limit;
    this._noun = noun;
    this._all = false;
    this.root = element("button", { type: "button", class: "more", hidden: true });
    this.root.addEventListener("click", () => {
      this._all = !this._all;
      onChange();
    });
  }

  /** Return the items to show, and say how many there are. */
  shown(items) {
    this.root.hidden = items.length <= this._limit;
    const all = `Show all ${items.length.toLocaleString("en")} ${this._noun}`;
    setText(this.root, this._all ? `Show the first ${this._limit} ${this._noun}` : all);
    return this._all ? items : items.slice(0, this._limit);
  }
}

/**
 * A table that shows its first rows, and all on request.
 *
 * A column is {label, kind, set(cell, item)}: "number" cells are aligned to the right, a "heading" names its row.
 * On a narrow screen each row becomes a card whose cells bear their column's label; roles keep it a table for readers.
 */
export class BoundedTable {
  constructor(caption, columns, keyOf, { rows = ROWS_SHOWN, noun = "rows" } = {}) {
    this._columns = columns;
    this._keyOf = keyOf;
    this._items = [];
    const headings = columns.map((column) =>
      element("th", { scope: "col", role: "columnheader", class: column.kind }, column.label));
    this._body = element("tbody", { role: "rowgroup" });
    this._caption = element("caption", {}, caption);
    this._more = new MoreButton(rows, noun, () => this.update(this._items));
    this.root = element("div", { class: "table" },
      element("table", { role: "table" }, this._caption,
        element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...headings)), this._body),
      this._more.root);
  }

  setCaption(text) {
    setText(this._caption, text);
  }

  update(items) {
    this._items = items;
    reconcile(this._body, this._more.shown(items), this._keyOf, () => this._makeRow());
  }

  _makeRow() {
    const cells = this._columns.map((column) => {
      const heading = column.kind === "heading";
      return element(heading ? "th" : "td", {
        role: heading ? "rowheader" : "cell",
        scope: heading ? "row" : null,
        class: column.kind,
        "data-label": column.label,
      });
    });
    return {
      root: element("tr", { role: "row" }, ...cells),
      update: (item) => this._columns.forEach((column, index) => column.set(cells[index], item)),
    };
  }
}

const nameLists = new WeakMap(); // cell -> what setNames made of it

/** Show names beside one another, the first few of them, and the rest on request. */
export function setNames(cell, names) {
  let view = nameLists.get(cell);
  if (view === undefined) {
    view = {
      none: element("span", {}, "–"),
      list: element("span", { class: "names" }),
      button: element("button", { type: "button", class: "inline" }),
      all: false,
    };
    view.button.addEventListener("click", () => {
      view.all = !view.all;
      setNames(cell, view.names);
    });
    // One child: on a phone a cell is a grid of its label and this.
    cell.replaceChildren(element("span", {}, view.none, view.list, view.button));
    nameLists.set(cell, view);
  }
  view.names = names;
  view.none.hidden = names.length > 0;
  const shown = (view.all ? names : names.slice(0, NAMES_SHOWN)).map((name, place) => ({ name, place }));
  reconcile(view.list, shown, (item) => item.name, ({ name }) => {
    const separator = element("span"); // text, so that it is copied and read aloud
    return {
      root: element("span", {}, separator, nameElement(name)),
      update({ place }) {
        setText(separator, place > 0 ? ", " : "");
      },
    };
  });
  view.button.hidden = names.length <= NAMES_SHOWN;
  setText(view.button, view.all ? "fewer" : `and ${names.length - NAMES_SHOWN} more`);
}
