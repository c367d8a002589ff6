// The language of the page. English texts are the keys; words.LANGUAGE.json has them in another one.
// Names, numbers, times, commands and what messages hold stay as they are.

const KEPT = "language";

/** Languages, as they call themselves. */
export const LANGUAGES = { en: "English", zh: "中文" };

/** The one that was chosen, else the first of the browser's that is there. */
export const language = chosen();
const table = language === "en" ? null : await loaded();
document.documentElement.lang = language === "zh" ? "zh-CN" : language;

function chosen() {
  const wanted = [localStorage.getItem(KEPT), ...(navigator.languages ?? [])];
  return wanted.map((each) => (each ?? "").split("-")[0]).find((each) => each in LANGUAGES) ?? "en";
}

async function loaded() {
  // Without its words the page is still of use.
  try { return await (await fetch(`/static/words.${language}.json`)).json(); } catch { return null; }
}

/** Choose a language for this browser. */
export function speak(wanted) {
  localStorage.setItem(KEPT, wanted);
  location.reload();
}

/** A text of the page. `{}` stands for the values in their order; a translation may number them. */
export function t(key, ...values) {
  return filled(table?.page[key] ?? key, values);
}

function filled(text, values) {
  let place = 0;
  return values.length ? text.replace(/\{(\d*)\}/g, (_, number) => String(values[number === "" ? place++ : Number(number)] ?? "")) : text;
}

const patterns = Object.entries(table?.told ?? {}).filter(([key]) => key.includes("{}"))
  .map(([key, text]) => ({ text, letters: key.replaceAll("{}", "").length, fits: new RegExp(`^${key.split("{}").map(literal).join("(.+?)")}$`, "s") }))
  .sort((one, other) => other.letters - one.letters);

function literal(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

/** A text that the console put together, such as what is wrong; its parts are told as well. */
export function told(text) {
  if (!table || !text) return text;
  const known = table.told[text];
  if (known) return known;
  for (const { text: wanted, fits } of patterns) {
    const found = fits.exec(text);
    if (found) return filled(wanted, found.slice(1).map(told));
  }
  return text;
}
