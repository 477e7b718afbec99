// Columns for pictures, from the points of a history: plain functions of arrays.

const BINS = 120; // of the shares over time: wider than a pixel's noise, narrower than a restart that one looks for
const GAP = 4; // times the usual distance of the points before it or after it: as far apart, nobody looked in between
const BESIDE = 3; // distances on either side say what is usual there: points are sparse where one scrapes or thins out
const FEW = 4; // points; fewer do not say what is usual
const FAR_S = 60; // of few points: whoever follows a history looks more often

/** Return {times, columns}: one column for each reader, with a null where the points have a gap. */
export function lines(points, readers) {
  const times = [];
  const columns = readers.map(() => []);
  const distances = points.slice(1).map((point, index) => point.t - points[index].t);
  points.forEach((point, index) => {
    if (index > 0 && isGap(distances, index - 1)) {
      times.push((point.t + points[index - 1].t) / 2);
      for (const column of columns) column.push(null);
    }
    times.push(point.t);
    readers.forEach((reader, place) => columns[place].push(reader(point)));
  });
  return { times, columns };
}

function isGap(distances, place) {
  const before = median(distances.slice(Math.max(0, place - BESIDE), place));
  const after = median(distances.slice(place + 1, place + 1 + BESIDE));
  if (distances.length + 1 < FEW && distances[place] > FAR_S) return true;
  const usual = Math.max(before, after);
  return usual > 0 && distances[place] > GAP * usual;
}

/**
 * Return {times, columns}: what share of the time between two of `times` went into each category, summed from the
 * first category on, so that columns drawn from the last to the first are bands upon one another.
 *
 * The points bear seconds since the beginning of the job; between two of them the time is taken to be spent evenly.
 */
export function shares(points, categories) {
  const known = points.filter((point) => point.seconds.size > 0);
  if (known.length < 2) return { times: [], columns: categories.map(() => []) };
  const first = known[0].t;
  const width = (known[known.length - 1].t - first) / Math.min(BINS, known.length - 1);
  const count = Math.round((known[known.length - 1].t - first) / width);
  const times = Array.from({ length: count + 1 }, (_, index) => first + index * width);
  const totals = categories.map((category) => at(known, times, (point) => point.seconds.get(category) ?? 0));
  const columns = categories.map(() => []);
  for (let index = 0; index < count; index += 1) {
    const spent = totals.map((total) => Math.max(0, total[index + 1] - total[index]));
    const sum = spent.reduce((left, right) => left + right, 0);
    let until = 0;
    categories.forEach((_, place) => {
      until += spent[place];
      // Less than a thousandth of the time is accounted for: the job had ended, or its figures began again.
      columns[place].push(sum > width / 1000 ? (100 * until) / sum : null);
    });
  }
  for (const column of columns) column.push(column[column.length - 1] ?? null); // the last step needs an end
  return { times, columns };
}

/** Return a running total at some times, by linear interpolation. */
function at(points, times, read) {
  let place = 0;
  return times.map((moment) => {
    while (place < points.length - 2 && points[place + 1].t < moment) place += 1;
    const [before, after] = [points[place], points[place + 1]];
    const part = Math.min(1, Math.max(0, (moment - before.t) / (after.t - before.t)));
    return read(before) + part * (read(after) - read(before));
  });
}

/** Return what is known of a column's values: the newest, the lowest and the highest; null without any. */
export function extent(column) {
  const values = column.filter((value) => value !== null);
  if (values.length === 0) return null;
  const low = values.reduce((left, right) => Math.min(left, right));
  const high = values.reduce((left, right) => Math.max(left, right));
  return { last: values[values.length - 1], low, high };
}

function median(values) {
  if (values.length === 0) return 0;
  return [...values].sort((left, right) => left - right)[Math.floor((values.length - 1) / 2)];
}
