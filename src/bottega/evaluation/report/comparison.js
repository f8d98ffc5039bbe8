"use strict";
// Paired comparison of two methods on the items that both answered: Newcombe's interval and McNemar's exact p-value, as
// bottega.evaluation.metrics.metric computes them.
const Z = 1.959963984540054;

function wilson(right, n) {
  const p = right / n, z2 = Z * Z / n;
  const half = Z * Math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2);
  const middle = (p + z2 / 2) / (1 + z2);
  return { p, low: Math.max(0, middle - half), high: Math.min(1, middle + half) };
}

function newcombe(both, won, lost, neither) {
  const n = both + won + lost + neither, ours = both + won, theirs = both + lost;
  const a = wilson(ours, n), b = wilson(theirs, n);
  let covariance = n * both - ours * theirs;
  if (covariance > 0) covariance = Math.max(covariance - n / 2, 0);
  const spread = Math.sqrt(ours * (n - ours) * theirs * (n - theirs));
  const phi = spread ? covariance / spread : 0;
  const margin = (x, y) => Math.sqrt(Math.max(0, x * x + y * y - 2 * phi * x * y));
  const value = (won - lost) / n;
  return {
    value,
    low: value - margin(a.p - a.low, b.high - b.p),
    high: value + margin(a.high - a.p, b.p - b.low),
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

// Compare two rows of scores; null marks an item without an answer.
function difference(ours, theirs) {
  let n = 0, gain = 0, binary = true, both = 0, won = 0, lost = 0;
  ours.forEach((a, index) => {
    const b = theirs[index];
    if (a === null || b === null) return;
    n += 1;
    gain += a - b;
    binary = binary && (a === 0 || a === 1) && (b === 0 || b === 1);
    if (a > b) won += 1;
    else if (b > a) lost += 1;
    else if (a) both += 1;
  });
  if (!n) return { n };
  const result = { n, won, lost, value: gain / n };
  if (!binary) return result;
  return { ...result, ...newcombe(both, won, lost, n - both - won - lost), p: mcnemar(won, lost) };
}

function signed(value) {
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
}

function describe(result) {
  if (!result.n) return "No item was answered by both.";
  const start = `${signed(result.value)} on the ${result.n.toLocaleString("en")} items that both answered`;
  const counts = `${result.won} better by the first, ${result.lost} by the second`;
  if (result.p === undefined) return `${start}; ${counts}. Scores between 0 and 1: no p-value.`;
  const p = result.p < 0.001 ? "p < 0.001" : `p = ${result.p.toFixed(3)}`;
  return `${start}, 95 % interval ${signed(result.low)} to ${signed(result.high)}, ${p}; ${counts}.`;
}

function compare(card, answers) {
  const [ours, theirs] = ["ours", "theirs"].map((name) => card.querySelector(`[data-${name}]`));
  const line = card.querySelector("[data-difference]");
  const scores = (row) => answers[row].map((answer) => (Array.isArray(answer) ? answer[2] : null));
  const update = () => {
    line.textContent = describe(difference(scores(ours.value), scores(theirs.value)));
  };
  ours.addEventListener("change", update);
  theirs.addEventListener("change", update);
  update();
}
