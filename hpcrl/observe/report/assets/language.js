/* uPlot takes navigator.language for numbers; with LANG=C.UTF-8 some browsers have "C" there, which is no language tag. */
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US", configurable: true });
}
