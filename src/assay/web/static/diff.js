// Differences between two answers, in tokens if their texts are known, else in words.

import { element, visibleText } from "./dom.js";

const MAX_CELLS = 4_000_000; // of the table of the longest common subsequence

// The texts of the tokens, or words, spaces and signs; joined, they are the text.
export function piecesOf({ pieces, text }) {
  return pieces ?? String(text ?? "").match(/\s*[\p{L}\p{N}_]+|\s*[^\s\p{L}\p{N}_]|\s+/gu) ?? [];
}

// The position of the first piece in which an answer differs from another one; its length if it only begins like it.
export function firstDifference(pieces, others) {
  const at = pieces.findIndex((piece, index) => piece !== others[index]);
  return at < 0 ? pieces.length : at;
}

// Of each piece, whether it is new: not part of what the answer has in common with the other one, in the same order.
export function newPieces(pieces, others) {
  const start = Math.min(firstDifference(pieces, others), others.length);
  let end = 0;
  while (end < Math.min(pieces.length, others.length) - start && pieces.at(-1 - end) === others.at(-1 - end)) end++;
  const marks = pieces.map((_, index) => index >= start && index < pieces.length - end);
  const [a, b] = [pieces.slice(start, pieces.length - end), others.slice(start, others.length - end)];
  if (a.length * b.length <= MAX_CELLS) for (const index of common(a, b)) marks[start + index] = false;
  return marks;
}

// Positions in `a` of a longest common subsequence of both.
function common(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i * width + j] =
        a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const found = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; )
    if (a[i] === b[j]) {
      found.push(i++);
      j++;
    } else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i++;
    else j++;
  return found;
}

// The text with some of its pieces marked.
export function markedText(pieces, isMarked, className = "text") {
  const parts = pieces.map((piece, index) =>
    isMarked(index) ? element("mark", { text: visibleText(piece).replace(/^\n+$/, "\u21b5$&") }) : visibleText(piece),
  );
  return element("pre", { class: className, dir: "auto" }, parts);
}
