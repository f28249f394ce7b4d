// The theme that was chosen last, before the first paint. "auto" follows the system.
"use strict";
{
  const themes = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    const saved = localStorage.getItem("loragraph.theme");
    if (themes.includes(saved)) theme = saved;
  } catch {
    // Storage may be forbidden; the system's theme is a good one.
  }
  document.documentElement.dataset.theme = theme;
}
