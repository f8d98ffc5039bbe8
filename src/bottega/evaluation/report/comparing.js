"use strict";
// Two methods on the items that both answered: Newcombe's interval and McNemar's exact p-value, as
// bottega.evaluation.metrics.intervals computes them.
const Z = 1.959963984540054;

function wilson(right, n) {
  const p = right / n, z2 = Z * Z / n;
  const half = Z * Math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2);
  const middle = (p + z2 / 2) / (1 + z2);
  return { p, low: Math.max(0, middle - half), high: Math.min(1, middle + half) };
}

function newcombe(both, won, lost, neither) {
  const n = both + won + lost + neither, we = both + won, they = both + lost;
  const a = wilson(we, n), b = wilson(they, n);
  let together = n * both - we * they;
  if (together > 0) together = Math.max(together - n / 2, 0);
  const spread = Math.sqrt(we * (n - we) * they * (n - they));
  const phi = spread ? together / spread : 0;
  const joined = (x, y) => Math.sqrt(Math.max(0, x * x + y * y - 2 * phi * x * y));
  const value = (won - lost) / n;
  return {
    value,
    low: value - joined(a.p - a.low, b.high - b.p),
    high: value + joined(a.high - a.p, b.p - b.low),
  };
}

function mcnemar(won, lost) {
  const n = won + lost, fewer = Math.min(won, lost);
  let log = -n * Math.LN2, sum = 0;
  for (let k = 0; k <= fewer; k++) {
    sum += Math.exp(log);
    log += Math.log((n - k) / (k + 1));
  }
  return n ? Math.min(1, 2 * sum) : 1;
}

// Of two rows of scores, null where an item was not answered.
function difference(ours, theirs) {
  let n = 0, gain = 0, binary = true, both = 0, won = 0, lost = 0;
  ours.forEach((a, place) => {
    const b = theirs[place];
    if (a === null || b === null) return;
    n += 1;
    gain += a - b;
    binary = binary && (a === 0 || a === 1) && (b === 0 || b === 1);
    if (a > b) won += 1;
    else if (b > a) lost += 1;
    else if (a) both += 1;
  });
  if (!n) return { n };
  const found = { n, won, lost, value: gain / n };
  if (!binary) return found;
  return { ...found, ...newcombe(both, won, lost, n - both - won - lost), p: mcnemar(won, lost) };
}

function signed(value) {
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
}

function told(found) {
  if (!found.n) return "No item was answered by both.";
  const start = `${signed(found.value)} on the ${found.n.toLocaleString("en")} items that both answered`;
  const counts = `${found.won} better by the first, ${found.lost} by the second`;
  if (found.p === undefined) return `${start}; ${counts}. Scores between 0 and 1: no test here.`;
  const p = found.p < 0.001 ? "p < 0.001" : `p = ${found.p.toFixed(3)}`;
  return `${start}, 95 % interval ${signed(found.low)} to ${signed(found.high)}, ${p}; ${counts}.`;
}

function compare(card, answers) {
  const [ours, theirs] = ["ours", "theirs"].map((name) => card.querySelector(`[data-${name}]`));
  const line = card.querySelector("[data-difference]");
  const scores = (row) => answers[row].map((one) => (Array.isArray(one) ? one[2] : null));
  const show = () => {
    line.textContent = told(difference(scores(ours.value), scores(theirs.value)));
  };
  ours.addEventListener("change", show);
  theirs.addEventListener("change", show);
  show();
}
