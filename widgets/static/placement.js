// The placement editor: its html comes from the kernel; this drags cards onto pools, and steps them with arrow keys.
import { replace } from "./forms.js";

const PLACEMENT_DRAG_PX = 4;

export function mountPlacement(area, send) {
  let drag = null; // the card under the pointer, from its press to its release
  let waiting = null; // what came to be drawn meanwhile
  let refused = 0;
  let dropped = false; // whether the click that follows is the end of a drag

  function draw(data) {
    if (drag) {
      waiting = data;
      return;
    }
    replace(area, data.html);
    if (data.refused !== refused) undoFields();
    refused = data.refused;
  }

  // What was refused is not what is: fields go back to what the kernel has drawn.
  function undoFields() {
    for (const field of area.querySelectorAll("input")) {
      field.value = field.defaultValue;
      delete field.dataset.typed;
    }
  }

  function poolAt(event) {
    const under = area.getRootNode().elementsFromPoint(event.clientX, event.clientY);
    return under.find((element) => element.dataset.pool && area.contains(element)) || null;
  }

  function mark(pool) {
    if (drag.over === pool) return;
    if (drag.over) delete drag.over.dataset.over;
    if (pool) pool.dataset.over = "";
    drag.over = pool;
  }

  function end() {
    mark(null);
    drag.card.style.transform = "";
    delete drag.card.dataset.dragged;
    drag = null;
    if (waiting) draw(waiting);
    waiting = null;
  }

  area.addEventListener("pointerdown", (event) => {
    dropped = false;
    const card = event.target.closest("[data-role]");
    if (!card || event.button || drag || card.getAttribute("aria-disabled") === "true") return;
    drag = { card, x: event.clientX, y: event.clientY, moves: false, over: null };
    card.setPointerCapture(event.pointerId);
  });
  area.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [x, y] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moves && Math.hypot(x, y) < PLACEMENT_DRAG_PX) return;
    drag.moves = true;
    drag.card.dataset.dragged = "";
    drag.card.style.transform = `translate(${x}px, ${y}px)`;
    mark(poolAt(event));
  });
  area.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { card, moves } = drag;
    const pool = moves ? poolAt(event) : null;
    dropped = moves;
    end();
    if (pool && !pool.contains(card)) send("put", { role: card.dataset.role, value: pool.dataset.pool });
  });
  area.addEventListener("pointercancel", () => drag && end());
  area.addEventListener("click", (event) => {
    if (dropped) event.stopPropagation();
    dropped = false;
  }, true);

  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && drag) {
      dropped = true;
      end();
      return;
    }
    const card = event.target;
    if (!card.dataset.role || card.getAttribute("aria-disabled") === "true") return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    send("step", { role: card.dataset.role, by });
    event.preventDefault();
    event.stopPropagation();
  });

  return { draw };
}
