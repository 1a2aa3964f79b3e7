// Samples and conversations: html of the kernel, in which arrow keys go from token to token, from row to row and from turn
// to turn; of a token a line says the numbers, and of a turn they fold what it was answered.
import { replace } from "./forms.js";
import { make } from "./dom.js";

export function mountItems(area) {
  const page = make("div");
  area.append(page);

  const saysOf = (token) => token.dataset.title || token.title;
  const tell = (token) => {
    const line = page.querySelector("[data-says]");
    if (line && line.textContent !== saysOf(token)) line.textContent = saysOf(token);
  };
  const focusedToken = () => page.querySelector("[data-token]:focus");

  // the item a line above or below, nearest from left to right
  function across(items, item, down) {
    const box = item.getBoundingClientRect();
    const middle = (box.left + box.right) / 2;
    const far = (other) => {
      const theirs = other.getBoundingClientRect();
      const lines = down ? theirs.top - box.top : box.top - theirs.top;
      return lines > 2 ? lines * 1e4 + Math.abs((theirs.left + theirs.right) / 2 - middle) : Infinity;
    };
    const best = items.reduce((one, other) => (far(other) < far(one) ? other : one), item);
    return far(best) < Infinity ? best : item;
  }

  function step(items, item, key) {
    const at = items.indexOf(item);
    if (key === "ArrowUp" || key === "ArrowDown") return across(items, item, key === "ArrowDown");
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: items.length - 1 }[key];
    return to === undefined ? undefined : items[Math.max(0, Math.min(items.length - 1, to))];
  }

  // to open what a turn was answered is not to go there; this is before the panel hears of it
  page.addEventListener("click", (event) => {
    if (event.target.closest("summary")) event.stopPropagation();
  });
  page.addEventListener("keydown", (event) => {
    if (event.target.closest("summary")) {
      event.stopPropagation(); // Enter folds
      return;
    }
    const group = event.target.closest("[data-steps]");
    const item = event.target.closest("[data-item]");
    if (!group || !item) return;
    const fold = { ArrowRight: true, ArrowLeft: false }[event.key];
    const folds = item.getAttribute("role") === "treeitem" && fold !== undefined;
    const next = folds ? item : step([...group.querySelectorAll("[data-item]")], item, event.key);
    if (!next) return;
    event.preventDefault();
    if (folds) for (const details of item.querySelectorAll("details")) details.open = fold;
    next.focus();
  });
  page.addEventListener("focusin", (event) => {
    const item = event.target.closest("[data-item]");
    if (!item) return;
    for (const other of item.closest("[data-steps]").querySelectorAll("[data-item]")) {
      other.tabIndex = other === item ? 0 : -1;
    }
    if (item.dataset.token !== undefined) tell(item);
  });
  page.addEventListener("mouseover", (event) => {
    const token = event.target.closest("[data-token]");
    if (token) tell(token);
  });
  page.addEventListener("mouseout", (event) => {
    if (event.target.closest("[data-token]") && focusedToken()) tell(focusedToken());
  });

  return { draw: (data) => replace(page, data.html) };
}
