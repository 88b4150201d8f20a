import { readFileSync } from "node:fs";

/** Tell the version of an installed package. */
export function versionOf(name) {
  return JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url), "utf8")).version;
}
