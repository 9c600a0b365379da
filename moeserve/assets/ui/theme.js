// Loaded before the page is painted, so that a chosen theme does not flash. "" follows the system.
const THEMES = ["", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("moeserve.theme", theme);
  } catch { /* storage may be off: the choice then lasts as long as the page */ }
}

try {
  document.documentElement.dataset.theme = localStorage.getItem("moeserve.theme") ?? "";
} catch { /* as above */ }

globalThis.moeserveTheme = {
  next() {
    const now = document.documentElement.dataset.theme ?? "";
    setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
    dispatchEvent(new Event("theme"));
    return document.documentElement.dataset.theme;
  },
};
