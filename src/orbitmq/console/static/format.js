import { t } from "./words.js";
// Numbers, times and durations as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const UNITS = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]];

/** 950 · 8,200 · 12.4k · 3.1M */
export function count(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of UNITS) {
    const divisor = letter === "k" ? 1e3 : unit;
    if (size >= unit) return trim(value / divisor) + letter;
  }
  return whole.format(value);
}

export function exact(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.005) return "<0.01";
  if (value > 0 && value < 1) return value.toFixed(2).replace(/0$/, "");
  return value < 10 && value % 1 ? value.toFixed(1).replace(/\.0$/, "") : count(Math.round(value));
}

function trim(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
}

/** 0 s · 45 s · 3 min 20 s · 2 h 5 min · 3 d */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.95) return seconds > 0 ? "<1 s" : "0 s";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 10) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 && hours < 10 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d`;
}

/** The same in one unit: 45 s · 3 min · 2 h · 3 d */
export function brief(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return seconds > 0 && seconds < 0.95 ? "<1 s" : `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
}

/** 80 µs · 4 ms · 1.2 s */
export function fine(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 0.001) return `${Math.max(1, Math.round(seconds * 1e6))} µs`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${place && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const short = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** The time of day, with the date when it is not today's. */
export function when(epoch, withSeconds = true) {
  if (!epoch) return "–";
  const date = new Date(epoch * 1000);
  if (Math.abs(Date.now() - date) < 43_200_000) return (withSeconds ? clock : short).format(date);
  return day.format(date);
}

export function precise(epoch) {
  if (!epoch) return "–";
  const date = new Date(epoch * 1000);
  return `${date.toLocaleDateString("en-CA")} ${clock.format(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** The time of day to the millisecond, with the date when it is not today's. */
export function instant(epoch) {
  if (!epoch) return "–";
  const date = new Date(epoch * 1000);
  const time = `${clock.format(date)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
  return Math.abs(Date.now() - date) < 43_200_000 ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}

let ahead = 0;

/** The console's clock counts, not the browser's. */
export function sync(at) {
  ahead = at - Date.now() / 1000;
}

export function ago(epoch) {
  return epoch ? t("{} ago", duration(Math.max(0, Date.now() / 1000 + ahead - epoch))) : t("never");
}

export function percent(share) {
  return share === null || share === undefined || share < 0 ? "–" : `${Math.round(share * 100)} %`;
}

export function plural(number, word, format = exact) {
  return t(`{} ${word}${number === 1 ? "" : "s"}`, format(number));
}
