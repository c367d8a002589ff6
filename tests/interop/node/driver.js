// Does with the Node client what it is told, line by line; runs in a process of its own.
//
// Every line of the input is a JSON object with `do` and its arguments. Every one is answered by a
// line {"done": ...} or {"failed": ...}; what consumers receive comes in between as
// {"message": ...}. The package is found through NODE_PATH.

'use strict';

const readline = require('readline');
const { Consumer, Message, Producer } = require('ali-ons');

// The package logs to standard output, which carries the answers.
const logger = { info() {}, debug() {}, warn: console.error, error: console.error };
// Asked for by the package, and used only to look addresses up over HTTP.
const httpclient = {};
const producers = new Map();
const consumers = new Map();

function main() {
  const lines = readline.createInterface({ input: process.stdin });
  // One after the other: answers come in the order of the questions.
  let before = Promise.resolve();
  lines.on('line', line => {
    before = before.then(() => answer(JSON.parse(line)));
  });
  lines.on('close', () => before.then(closeAll).finally(() => process.exit(0)));
}

async function answer({ do: what, ...asked }) {
  try {
    tell({ done: (await COMMANDS[what](asked)) ?? null });
  } catch (error) {
    tell({ failed: `${error.name}: ${error.message}` });
  }
}

function tell(line) {
  process.stdout.write(JSON.stringify(line) + '\n');
}

const COMMANDS = { produce, send, consume, stop };

async function produce({ group, name_server, keys }) {
  const producer = new Producer({ ...common(name_server, keys), producerGroup: group });
  producer.on('error', error => console.error(error.message));
  await producer.ready();
  producers.set(group, producer);
}

async function send({ group, messages }) {
  const results = [];
  for (const { topic, tag, body, keys, level, properties } of messages) {
    const message = new Message(topic, tag, body);
    if (keys) message.keys = keys;
    if (level) message.delayTimeLevel = level;
    Object.assign(message.properties, properties);
    const result = await producers.get(group).send(message);
    results.push([ result.sendStatus, result.msgId, Number(result.messageQueue.queueId), Number(result.queueOffset) ]);
  }
  return results;
}

async function consume({ group, topic, name_server, keys, expression, sql, broadcast, fail, retries }) {
  const left = new Map(Object.entries(fail ?? {}));
  const consumer = new Consumer({
    ...common(name_server, keys),
    consumerGroup: group,
    consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
    isBroadcast: Boolean(broadcast),
    maxReconsumeTimes: retries ?? 16,
    rebalanceInterval: 1000,
    heartbeatBrokerInterval: 1000,
    persistConsumerOffsetInterval: 200,
    pullTimeDelayMillsWhenException: 200,
  });
  consumer.on('error', error => console.error(error.message));
  const wanted = sql ? { expressionType: 'SQL92', subString: sql } : expression ?? '*';
  consumer.subscribe(topic, wanted, async message => {
    const body = message.body.toString();
    tell({ message: told(message, body, group) });
    const times = left.get(body) ?? 0;
    if (times > 0) {
      left.set(body, times - 1);
      // Not ACTION_RETRY, which the package overlooks for messages that come from the retry topic.
      throw new Error(`${body} fails`);
    }
  });
  await consumer.ready();
  consumers.set(group, consumer);
}

async function stop({ group }) {
  const consumer = consumers.get(group);
  consumers.delete(group);
  await consumer.close();
}

function told(message, body, group) {
  const { topic, tags, keys, queueId, queueOffset, reconsumeTimes, properties } = message;
  return { group, body, topic, tag: tags, keys, queue: queueId, offset: Number(queueOffset), times: reconsumeTimes, properties };
}

function common(nameServer, keys) {
  const [ accessKey, secretKey ] = keys ?? [];
  return { httpclient, logger, nameSrv: nameServer, accessKey, secretKey, pollNameServerInteval: 1000 };
}

async function closeAll() {
  for (const each of [ ...consumers.values(), ...producers.values() ]) {
    await each.close();
  }
}

main();
