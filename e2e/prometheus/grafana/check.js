// Checks dashboards against the JSON schema that is generated from types.ts. Grafana silently ignores unknown options.
const fs = require('fs');
const Ajv = require('ajv');

const ajv = new Ajv({ allErrors: true, strict: false });
ajv.addSchema(require('./schema.json'), 'grafana');

// check prints the errors of a value and returns their number.
function check(type, value, where) {
  const valid = ajv.getSchema('grafana#/definitions/' + type);
  if (!valid) {
    console.log(`${where}: types.ts has no ${type}`);
    return 1;
  }
  if (valid(value)) {
    return 0;
  }
  for (const e of valid.errors) {
    console.log(`${where}: ${e.instancePath} ${e.message} ${JSON.stringify(e.params)}`);
  }
  return valid.errors.length;
}

// camel converts state-timeline to StateTimeline.
const camel = (type) => type.replace(/(^|-)(\w)/g, (_, dash, letter) => letter.toUpperCase());

function checkPanel(panel, where) {
  if (panel.type === 'row') {
    return check('OurRow', panel, where) + (panel.panels || []).reduce((n, p) => n + checkPanel(p, `${where} / ${p.title}`), 0);
  }
  let faults = check('OurPanel', panel, where) + check(`Our${camel(panel.type)}Options`, panel.options, where + ' options');
  for (const target of panel.targets) {
    faults += check('OurTarget', target, `${where} target ${target.refId}`);
  }
  const custom = panel.fieldConfig.defaults.custom;
  if (custom) {
    faults += check(`Our${camel(panel.type)}Custom`, custom, where + ' custom');
  }
  return faults;
}

// A schema that accepts everything would pass unnoticed.
const wrong = { type: 'timeseries', title: 'x', options: { legend: 1 }, targets: [{ refId: 'A', expression: 'up' }], fieldConfig: { defaults: { unit: 7 }, overrides: [] } };
const log = console.log;
console.log = () => {};
const noticed = checkPanel(wrong, 'x');
console.log = log;
if (noticed < 3) {
  console.log(`of three faults only ${noticed} were noticed: the schema is too loose`);
  process.exit(1);
}

let faults = 0;
for (const file of process.argv.slice(2)) {
  const dashboard = JSON.parse(fs.readFileSync(file, 'utf8'));
  let n = check('OurDashboard', { ...dashboard, panels: undefined, annotations: undefined }, file);
  for (const annotation of dashboard.annotations.list) {
    n += check('OurAnnotation', annotation, `${file}: annotation ${annotation.name}`);
  }
  for (const panel of dashboard.panels) {
    n += checkPanel(panel, `${file}: ${panel.title}`);
  }
  console.log(`${file}: ${dashboard.panels.length} panels, ${n} faults`);
  faults += n;
}
process.exit(faults ? 1 : 0);
