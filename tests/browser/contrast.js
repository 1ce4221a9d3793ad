// text whose contrast with what is behind it is below 4.5, as WCAG counts it
(() => {
  const rgb = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
      && e.offsetParent && !e.closest("script, .unseen")).filter((e) => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05) < 4.5;
  }).map((e) => e.outerHTML.slice(0, 120));
})()
