/** Degrees between the hues of consecutive requests. With this angle, hues stay far apart for many requests. */
const GOLDEN_ANGLE = 137.508;

/** @type {Map<number, string>} */
const made = new Map();

/**
 * Returns the colour of the request with a number. All views show the request in this colour.
 *
 * @param {number} number
 * @returns {string}
 */
export function colourOf(number) {
  let colour = made.get(number);
  if (colour === undefined) {
    const hue = (215 + number * GOLDEN_ANGLE) % 360;
    colour = `oklch(0.7 0.13 ${hue.toFixed(1)})`;
    if (made.size > 4096) made.clear();
    made.set(number, colour);
  }
  return colour;
}

/**
 * Returns the colours and the font of the page's current theme (light or dark).
 *
 * @param {Element} element
 */
export function themeOf(element) {
  const probe = getComputedStyle(element);
  /** @param {string} name */
  const resolve = (name) => {
    const span = document.createElement("span");
    span.style.color = `var(${name})`;
    element.append(span);
    const colour = getComputedStyle(span).color;
    span.remove();
    return colour;
  };
  return {
    ink: resolve("--ink"), quiet: resolve("--quiet"), line: resolve("--line"), ground: resolve("--ground"),
    card: resolve("--card"), bad: resolve("--bad"), warn: resolve("--warn"), good: resolve("--good"),
    font: probe.fontFamily,
  };
}
