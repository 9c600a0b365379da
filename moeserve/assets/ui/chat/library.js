// What can be done with kept conversations as a whole: export, import, delete.

import { $ } from "../dom.js";
import { notice } from "../notice.js";
import { fileName, fromJson, save, toJson, toMarkdown } from "./transfer.js";

/** Saves a conversation with all its branches. */
export async function exportJson(store, record) {
  const text = toJson([await store.load(record.id)]);
  save(fileName(record.title, "json"), "application/json", text);
}

/** Saves the branch of a conversation that is shown. */
export async function exportMarkdown(store, record) {
  const text = toMarkdown(await store.load(record.id));
  save(fileName(record.title, "md"), "text/markdown", text);
}

/** Saves all conversations. */
export async function exportAll(store) {
  const records = await store.list();
  const all = await Promise.all(records.map(({ id }) => store.load(id)));
  const day = new Date().toISOString().slice(0, 10);
  save(`conversations-${day}.json`, "application/json", toJson(all.filter(Boolean)));
}

/** Adds the conversations of files. Returns the id of the first one; undefined if there is none. */
export async function importFiles(store, files) {
  const added = [];
  for (const file of files) {
    try {
      const found = fromJson(await file.text());
      for (const each of found) if (await store.insert(each)) added.push(each.conversation);
    } catch (error) {
      notice(`“${file.name}” was not imported: ${error.message}.`);
    }
  }
  if (added.length === 1) notice(`Imported “${added[0].title}”.`);
  if (added.length > 1) notice(`Imported ${added.length} conversations.`);
  return added[0]?.id;
}

/** Deletes a conversation. `onUndo` is called after it was put back. */
export async function remove(store, record, onUndo) {
  const copy = await store.load(record.id);
  await store.remove(record.id);
  notice(`Deleted “${record.title}”.`, async () => {
    await store.insert(copy);
    onUndo();
  });
}

/** Deletes all conversations, if the user confirms it. Returns whether it did. */
export async function removeAll(store) {
  const records = await store.list();
  if (!records.length) {
    notice("There are no conversations.");
    return false;
  }
  const many = `all ${records.length} conversations`;
  $("delete-count").textContent = records.length > 1 ? many : "the conversation";
  if (!(await confirmed($("delete-dialog")))) return false;
  for (const { id } of records) await store.remove(id);
  return true;
}

/** Asks for a new title. Returns it; "" if the user gives none. */
export async function askForTitle(title) {
  $("rename-value").value = title;
  const answer = confirmed($("rename-dialog"));
  $("rename-value").select();
  return (await answer) ? $("rename-value").value.trim() : "";
}

/** Shows a dialog. Returns whether it was closed with its main button. */
function confirmed(dialog) {
  dialog.returnValue = "";
  dialog.querySelector(".cancel").onclick = () => dialog.close("");
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
