// A conversation: html of the kernel. Arrow keys go from turn to turn and fold what they were answered.
import { replace } from "./forms.js";
import { make } from "./dom.js";

export function mountConversation(area) {
  const page = make("div");
  area.append(page);

  const turns = () => [...page.querySelectorAll('[role="treeitem"]')];

  function reach(turn) {
    for (const other of turns()) other.tabIndex = other === turn ? 0 : -1;
    turn.focus();
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
    const turn = event.target.closest('[role="treeitem"]');
    if (!turn) return;
    const all = turns();
    const at = all.indexOf(turn);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    const fold = { ArrowRight: true, ArrowLeft: false }[event.key];
    if (to === undefined && fold === undefined) return;
    event.preventDefault();
    if (to !== undefined) reach(all[Math.max(0, Math.min(all.length - 1, to))]);
    else for (const details of turn.querySelectorAll("details")) details.open = fold;
  });

  return { draw: (data) => replace(page, data.html) };
}
