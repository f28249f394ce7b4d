// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 12,345; an en dash for what is not known. */
export const count = (value) => (known(value) ? whole.format(value) : "–");

/** A rate: one decimal below 100. */
export function rate(value) {
  if (!known(value)) return "–";
  return value < 99.95 ? tenth.format(value) : whole.format(value);
}

/** A scale without trailing zeros: 1, 0.6, -0.25. */
export const scale = (value) => (known(value) ? short.format(value) : "–");

/** Seconds: 84 ms, 1.2 s. */
export function seconds(value) {
  if (!known(value)) return "–";
  return value < 0.9995 ? `${whole.format(value * 1000)} ms` : `${tenth.format(value)} s`;
}

/** 512 B, 7.4 MiB. */
export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  let amount = value;
  while (amount >= 999.5 && power < units.length - 1) {
    amount /= 1024;
    power += 1;
  }
  return `${power ? rate(amount) : whole.format(amount)} ${units[power]}`;
}

/** 38 %; a dash where there is no whole. */
export const percent = (part, all) => (all > 0 ? `${whole.format((100 * part) / all)} %` : "–");

/** "1 token", "2 tokens". */
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
