// Small values that the browser keeps; in this page's memory where it keeps none.

const memory = new Map();

/** Values of this tab, and values of this browser. */
export const tab = area("sessionStorage");
export const browser = area("localStorage");

function area(name) {
  return {
    get(key) {
      try {
        return globalThis[name].getItem(key);
      } catch {
        return memory.get(key) ?? null;
      }
    },
    set(key, value) {
      try {
        globalThis[name].setItem(key, value);
      } catch {
        memory.set(key, value);
      }
    },
    remove(key) {
      memory.delete(key);
      try {
        globalThis[name].removeItem(key);
      } catch { /* there was nothing */ }
    },
  };
}
