import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Drives Apache's client from the command line: {@code Client <command> [name=value ...]}.
 *
 * <p>Every result is one JSON object per line on standard output; bodies are base64. The exit
 * status is 0 when the command did all it was asked for before its deadline. The address of the
 * name server is always given by {@code namesrv=}. {@link Session} runs many commands in one
 * process.
 */
public final class Client {
    /** The stream results are printed on; the libraries may print on System.out as they like. */
    private static final PrintStream OUT = System.out;

    /** What the client library itself says when no broker has a message with the key. */
    private static final int NO_MESSAGE = 208;

    private static final String COMPRESSION = "rocketmq.message.compressType";

    private final Map<String, String> options = new HashMap<>();

    /** Which command of a session this is; null when it has the process to itself. */
    private final Integer number;

    /** Open until a command that stays ("hold") is told to end. */
    private final CountDownLatch held = new CountDownLatch(1);

    /** Answers questions; only where a consumer was asked to. */
    private DefaultMQProducer replier;

    Client(Integer number, Iterable<String> settings) {
        this.number = number;
        for (String setting : settings) {
            int at = setting.indexOf('=');
            options.put(setting.substring(0, at), setting.substring(at + 1));
        }
    }

    public static void main(String[] args) {
        System.setOut(System.err);
        try {
            List<String> words = List.of(args);
            Client client = new Client(null, words.subList(1, words.size()));
            System.exit(client.run(words.get(0)) ? 0 : 3);
        } catch (Exception e) {
            e.printStackTrace();
            System.exit(1); // the client's own threads would keep the process alive
        }
    }

    /** Ends a command that stays until it is told to. */
    void release() {
        held.countDown();
    }

    boolean run(String command) throws Exception {
        switch (command) {
            case "topic":
                return createTopic();
            case "send":
                return send();
            case "transaction":
                return transaction();
            case "consume":
                return consume();
            case "pull":
                return pull();
            case "lite-pull":
                return litePull();
            case "request":
                return request();
            case "reset":
                return reset();
            case "inspect":
                return inspect();
            case "offsets":
                return offsets();
            case "query-key":
                return queryKey();
            case "view":
                return view();
            case "admin":
                return admin();
            default:
                throw new IllegalArgumentException("no command " + command);
        }
    }

    private boolean createTopic() throws Exception {
        DefaultMQAdminExt admin = startAdmin();
        for (String topic : text("topics").split(",")) {
            TopicConfig config =
                new TopicConfig(topic, number("queues", 4), number("queues", 4), 6);
            admin.createAndUpdateTopicConfig(text("broker"), config);
        }
        admin.shutdown();
        return true;
    }

    /** Sends count messages, in batches when batch is given, to one queue when queue is given. */
    private boolean send() throws Exception {
        DefaultMQProducer producer = newSender();
        producer.start();
        int count = number("count", 1);
        int batch = number("batch", 0);
        List<Message> waiting = new ArrayList<>();
        CountDownLatch answers = new CountDownLatch(options.containsKey("async") ? count : 0);
        for (int i = 0; i < count; i++) {
            Message message = message(i);
            if (batch == 0) {
                if (options.containsKey("oneway")) {
                    producer.sendOneway(message);
                } else if (options.containsKey("async")) {
                    sendLater(producer, message, answers);
                } else {
                    print(sent(sendOne(producer, message)));
                }
                continue;
            }
            waiting.add(message);
            if (waiting.size() == batch || i == count - 1) {
                print(sent(sendMany(producer, waiting)));
                waiting = new ArrayList<>();
            }
        }
        boolean done = answers.await(number("deadline", 60), TimeUnit.SECONDS);
        producer.shutdown();
        return done;
    }

    /** Both lines take the kind of compression from the system when a producer is made. */
    private DefaultMQProducer newSender() {
        synchronized (COMPRESSION) {
            System.setProperty(COMPRESSION, text("compression", "ZLIB"));
            DefaultMQProducer producer =
                new DefaultMQProducer(text("group", "driver-producer"), signing());
            configure(producer);
            return producer;
        }
    }

    private void sendLater(DefaultMQProducer producer, Message message, CountDownLatch answers)
        throws Exception {
        producer.send(message, new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                print(sent(result));
                answers.countDown();
            }

            @Override
            public void onException(Throwable refused) {
                print(refusal(refused));
                answers.countDown();
            }
        });
    }

    private SendResult sendOne(DefaultMQProducer producer, Message message) throws Exception {
        if (options.containsKey("ordered")) {
            String order = message.getUserProperty("order");
            return producer.send(message,
                (queues, m, key) -> queues.get(Math.floorMod(key.hashCode(), queues.size())),
                order);
        }
        if (options.containsKey("hash")) {
            return producer.send(message, new SelectMessageQueueByHash(), hashed(message));
        }
        if (!options.containsKey("queue")) {
            return producer.send(message);
        }
        int wanted = number("queue", 0);
        return producer.send(message, (queues, m, id) -> queues.get((int) id), wanted);
    }

    /** What a message is sent by: the key that it bears, as a number where it is one. */
    private Object hashed(Message message) {
        String key = message.getUserProperty("hash");
        if (!key.matches("-?[0-9]+")) {
            return key;
        }
        long number = Long.parseLong(key);
        return number == (int) number ? (Object) (int) number : (Object) number;
    }

    private SendResult sendMany(DefaultMQProducer producer, List<Message> messages)
        throws Exception {
        if (!options.containsKey("queue")) {
            return producer.send(messages);
        }
        for (MessageQueue queue : producer.fetchPublishMessageQueues(text("topic"))) {
            if (queue.getQueueId() == number("queue", 0)) {
                return producer.send(messages, queue);
            }
        }
        throw new IllegalStateException("no queue " + number("queue", 0));
    }

    /**
     * Sends half messages whose number decides their fate: commit, roll back, or leave it to the
     * broker's check, which then commits. Ends when every check that is due has come.
     */
    private boolean transaction() throws Exception {
        int count = number("count", 3);
        CountDownLatch checks = new CountDownLatch(count / 3);
        TransactionMQProducer producer =
            new TransactionMQProducer(text("group", "driver-transactions"), signing());
        configure(producer);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object i) {
                switch ((int) i % 3) {
                    case 0:
                        return LocalTransactionState.COMMIT_MESSAGE;
                    case 1:
                        return LocalTransactionState.ROLLBACK_MESSAGE;
                    default:
                        return LocalTransactionState.UNKNOW;
                }
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                print(received(message));
                checks.countDown();
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        for (int i = 0; i < count; i++) {
            print(sent(producer.sendMessageInTransaction(message(i), i)));
        }
        boolean done = checks.await(number("deadline", 60), TimeUnit.SECONDS);
        producer.shutdown();
        return done;
    }

    /**
     * Consumes until count messages were taken, or with hold until released; the first fail
     * deliveries of each fail.
     */
    private boolean consume() throws Exception {
        int fail = number("fail", 0);
        CountDownLatch taken = new CountDownLatch(number("count", 1));
        Map<String, AtomicInteger> deliveries = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = newConsumer(text("group"));
        consumer.setMaxReconsumeTimes(number("max-reconsume", -1));
        if (options.containsKey("broadcast")) {
            // The two lines keep this enumeration in different packages.
            var models = consumer.getMessageModel().getDeclaringClass();
            consumer.setMessageModel(Enum.valueOf(models, "BROADCASTING"));
        }
        if (options.containsKey("broker-rebalance")) {
            // Only the new line has it.
            consumer.getClass().getMethod("setClientRebalance", boolean.class)
                .invoke(consumer, false);
        }
        if (options.containsKey("sql")) {
            consumer.subscribe(text("topic"), MessageSelector.bySql(text("sql")));
        } else {
            consumer.subscribe(text("topic"), text("expression", "*"));
        }
        if (options.containsKey("orderly")) {
            consumer.setSuspendCurrentQueueTimeMillis(100);
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                takeAll(messages, deliveries, fail, taken)
                    ? ConsumeOrderlyStatus.SUCCESS
                    : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(number("retry-level", 0));
                return takeAll(messages, deliveries, fail, taken)
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                    : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
        if (options.containsKey("reply")) {
            replier = new DefaultMQProducer(text("group") + "-replies", signing());
            configure(replier);
            // As one client with the consumer, the two heartbeats of the start meet, and the one that
            // is dropped may be the consumer's, whose subscription the broker then does not know.
            replier.setInstanceName(text("instance", "driver") + "-replies");
            replier.start();
        }
        consumer.start();
        CountDownLatch end = options.containsKey("hold") ? held : taken;
        boolean done = end.await(number("deadline", 60), TimeUnit.SECONDS);
        consumer.shutdown();
        if (replier != null) {
            replier.shutdown();
        }
        return done;
    }

    private boolean takeAll(List<MessageExt> messages,
        Map<String, AtomicInteger> deliveries, int fail, CountDownLatch taken) {
        for (MessageExt message : messages) {
            print(received(message));
            AtomicInteger seen =
                deliveries.computeIfAbsent(message.getMsgId(), id -> new AtomicInteger());
            if (seen.incrementAndGet() <= fail) {
                return false;
            }
            if (replier != null) {
                reply(message);
            }
            taken.countDown();
        }
        return true;
    }

    private void reply(MessageExt message) {
        try {
            byte[] body = new StringBuilder(new String(message.getBody(), StandardCharsets.UTF_8))
                .reverse().toString().getBytes(StandardCharsets.UTF_8);
            print(sent(replier.send(MessageUtil.createReplyMessage(message, body))));
        } catch (Exception refused) {
            print(refusal(refused));
        }
    }

    /** Asks count questions, one after the other, and prints each reply. */
    private boolean request() throws Exception {
        DefaultMQProducer producer =
            new DefaultMQProducer(text("group", "driver-requests"), signing());
        configure(producer);
        producer.start();
        for (int i = 0; i < number("count", 1); i++) {
            try {
                Message reply = producer.request(message(i), number("patience", 10_000));
                Map<String, Object> line = new LinkedHashMap<>();
                line.put("topic", reply.getTopic());
                line.put("properties", new TreeMap<>(reply.getProperties()));
                line.put("body", Base64.getEncoder().encodeToString(reply.getBody()));
                print(line);
            } catch (Exception refused) {
                print(refusal(refused));
            }
        }
        producer.shutdown();
        return true;
    }

    /** Reads count messages as a member of a group, or with assign alone, and commits. */
    private boolean litePull() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(text("group"), signing());
        consumer.setNamesrvAddr(text("namesrv"));
        consumer.setInstanceName(text("instance", "driver"));
        consumer.setClientIP(text("client-ip", "127.0.0.1"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        boolean assigned = options.containsKey("assign");
        if (!assigned) {
            consumer.subscribe(text("topic"), text("expression", "*"));
        }
        consumer.start();
        if (assigned) {
            consumer.assign(consumer.fetchMessageQueues(text("topic")));
        }
        int wanted = number("count", 1);
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(number("deadline", 60));
        while (wanted > 0 && System.nanoTime() < until) {
            List<MessageExt> found = consumer.poll(1000);
            found.forEach(m -> print(received(m)));
            wanted -= found.size();
        }
        consumer.commitSync();
        consumer.shutdown();
        return wanted == 0;
    }

    /** Moves a group to a time of a topic, and prints where that is in each queue. */
    private boolean reset() throws Exception {
        DefaultMQAdminExt admin = startAdmin();
        long time = Long.parseLong(text("time"));
        admin.resetOffsetByTimestamp(text("topic"), text("group"), time, true)
            .forEach((queue, offset) -> {
                Map<String, Object> line = new LinkedHashMap<>();
                line.put("queueId", queue.getQueueId());
                line.put("offset", offset);
                print(line);
            });
        admin.shutdown();
        return true;
    }

    /** What an operator's tool is told of one consumer; with id, it also consumes a message. */
    private boolean inspect() throws Exception {
        DefaultMQAdminExt admin = startAdmin();
        String group = text("group");
        String client = text("client");
        var info = admin.getConsumerRunningInfo(group, client, true);
        Map<String, Object> line = new LinkedHashMap<>();
        List<String> owned = new ArrayList<>();
        info.getMqTable().forEach((queue, held) ->
            owned.add(queue.getTopic() + ":" + queue.getQueueId() + ":" + held.getCommitOffset()));
        line.put("owned", String.join(",", owned));
        line.put("properties", new TreeMap<>(info.getProperties()));
        line.put("subscriptions", String.valueOf(info.getSubscriptionSet().size()));
        line.put("stack", info.getJstack());
        line.put("text", info.formatString());
        List<String> positions = new ArrayList<>();
        admin.getConsumeStatus(text("topic"), group, client).forEach((member, offsets) ->
            offsets.forEach((queue, offset) ->
                positions.add(member + ":" + queue.getQueueId() + ":" + offset)));
        line.put("positions", String.join(",", positions));
        if (options.containsKey("id")) {
            var result = admin.consumeMessageDirectly(group, client, text("topic"), text("id"));
            line.put("direct", String.valueOf(result.getConsumeResult()));
        }
        print(line);
        admin.shutdown();
        return true;
    }

    /** Reads every queue of each topic from its first to its last offset. */
    private boolean pull() throws Exception {
        DefaultMQPullConsumer consumer = startPuller();
        for (String topic : text("topics").split(",")) {
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                long next = consumer.minOffset(queue);
                long end = consumer.maxOffset(queue);
                while (next < end) {
                    var found =
                        consumer.pull(queue, text("expression", "*"), next, number("batch", 32));
                    if (found.getPullStatus() == PullStatus.FOUND) {
                        found.getMsgFoundList().forEach(m -> print(received(m)));
                    }
                    if (found.getNextBeginOffset() <= next) {
                        throw new IllegalStateException(queue + " stays at " + next + ": " + found);
                    }
                    next = found.getNextBeginOffset();
                }
            }
        }
        consumer.shutdown();
        return true;
    }

    private boolean offsets() throws Exception {
        DefaultMQPullConsumer consumer = startPuller();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(text("topic"))) {
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("queueId", queue.getQueueId());
            line.put("min", consumer.minOffset(queue));
            line.put("max", consumer.maxOffset(queue));
            line.put("at", consumer.searchOffset(queue, Long.parseLong(text("time", "0"))));
            line.put("earliest", consumer.earliestMsgStoreTime(queue));
            consumer.updateConsumeOffset(queue, consumer.maxOffset(queue));
            consumer.getDefaultMQPullConsumerImpl().getOffsetStore().persist(queue);
            line.put("consumed", consumer.fetchConsumeOffset(queue, true));
            print(line);
        }
        consumer.shutdown();
        return true;
    }

    private boolean queryKey() throws Exception {
        DefaultMQAdminExt admin = startAdmin();
        long until = System.currentTimeMillis() + 3_600_000;
        for (String key : text("keys").split(",")) {
            try {
                var found = admin.queryMessage(text("topic"), key, number("max", 64), 0, until);
                found.getMessageList().forEach(m -> print(received(m)));
            } catch (MQClientException refused) {
                if (refused.getResponseCode() != NO_MESSAGE) {
                    throw refused;
                }
            }
        }
        admin.shutdown();
        return true;
    }

    private boolean view() throws Exception {
        DefaultMQAdminExt admin = startAdmin();
        for (String id : text("ids").split(",")) {
            print(received(admin.viewMessage(text("topic"), id)));
        }
        admin.shutdown();
        return true;
    }

    /** Every question an operator's tool asks; each prints one line with the answer as text. */
    private boolean admin() throws Exception {
        String topic = text("topic");
        String group = text("group");
        DefaultMQPushConsumer consumer = startConsumerAndAwaitMessage(topic, group);
        DefaultMQAdminExt admin = startAdmin();
        String broker = text("broker");
        Map<String, Question> questions = new LinkedHashMap<>();
        questions.put("route", () -> admin.examineTopicRouteInfo(topic));
        questions.put("cluster", () -> admin.examineBrokerClusterInfo());
        questions.put("topics", () -> admin.fetchAllTopicList());
        questions.put("topics-of-cluster",
            () -> admin.fetchTopicsByCLuster(text("cluster", "DefaultCluster")));
        questions.put("topic-stats", () -> admin.examineTopicStats(topic));
        questions.put("consume-stats", () -> admin.examineConsumeStats(group));
        questions.put("consume-stats-of-topic", () -> admin.examineConsumeStats(group, topic));
        questions.put("runtime", () -> admin.fetchBrokerRuntimeStats(broker));
        questions.put("broker-config", () -> admin.getBrokerConfig(broker));
        questions.put("topic-config", () -> admin.examineTopicConfig(broker, topic));
        questions.put("all-topic-configs", () -> admin.getAllTopicConfig(broker, 3000));
        questions.put("all-groups", () -> admin.getAllSubscriptionGroup(broker, 3000));
        questions.put("group-config", () -> admin.examineSubscriptionGroupConfig(broker, group));
        questions.put("topic-groups", () -> admin.queryTopicConsumeByWho(topic));
        questions.put("consumers", () -> admin.examineConsumerConnectionInfo(group));
        questions.put("producers",
            () -> admin.examineProducerConnectionInfo("driver-producer", topic));
        questions.put("running-info",
            () -> admin.getConsumerRunningInfo(group, consumer.buildMQClientId(), false)
                .formatString());
        questions.put("max-offset", () -> admin.maxOffset(
            admin.examineTopicStats(topic).getOffsetTable().keySet().iterator().next()));
        questions.put("consume-span", () -> admin.queryConsumeTimeSpan(topic, group));
        questions.put("set-config", () -> {
            admin.putKVConfig("DRIVER", "key", "value");
            return admin.getKVConfig("DRIVER", "key");
        });
        questions.put("no-such-topic", () -> admin.examineTopicRouteInfo("NoSuchTopic"));
        for (String unwanted : text("except", "").split(",")) {
            questions.remove(unwanted);
        }
        for (Map.Entry<String, Question> question : questions.entrySet()) {
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("question", question.getKey());
            try {
                Object answer = question.getValue().ask();
                line.put("answer", answer instanceof RemotingSerializable
                    ? RemotingSerializable.toJson(answer, false)
                    : String.valueOf(answer));
            } catch (Exception refused) {
                line.put("refused", String.valueOf(refused));
            }
            print(line);
        }
        admin.shutdown();
        consumer.shutdown();
        return true;
    }

    /** A member of the group for the questions about it; the topic must hold a message. */
    private DefaultMQPushConsumer startConsumerAndAwaitMessage(String topic, String group)
        throws Exception {
        CountDownLatch arrived = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = newConsumer(group);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            arrived.countDown();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        if (!arrived.await(number("deadline", 60), TimeUnit.SECONDS)) {
            throw new IllegalStateException("no message of " + topic + " arrived");
        }
        return consumer;
    }

    private interface Question {
        Object ask() throws Exception;
    }

    /** Signs requests, when there is somebody to sign them for. */
    private RPCHook signing() {
        if (!options.containsKey("access-key")) {
            return null;
        }
        return new AclClientRPCHook(
            new SessionCredentials(text("access-key"), text("secret-key")));
    }

    private void configure(DefaultMQProducer producer) {
        producer.setNamesrvAddr(text("namesrv"));
        producer.setInstanceName(text("instance", "driver"));
        producer.setClientIP(text("client-ip", "127.0.0.1"));
        producer.setSendMsgTimeout(10_000);
        producer.setCompressMsgBodyOverHowmuch(number("compress-above", 4096));
        producer.setDefaultTopicQueueNums(number("queues", 4));
    }

    private DefaultMQPushConsumer newConsumer(String group) {
        AllocateMessageQueueStrategy strategy = text("strategy", "AVG").equals("CONSISTENT_HASH")
            ? new AllocateMessageQueueConsistentHash()
            : new AllocateMessageQueueAveragely();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, signing(), strategy);
        consumer.setNamesrvAddr(text("namesrv"));
        consumer.setInstanceName(text("instance", "driver"));
        consumer.setClientIP(text("client-ip", "127.0.0.1"));
        consumer.setConsumeFromWhere(options.containsKey("last")
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
            : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(1);
        // Otherwise what was taken and printed may not be in the progress that it reports.
        consumer.setAwaitTerminationMillisWhenShutdown(10_000);
        consumer.setPollNameServerInterval(number("route-interval", 30_000));
        // Where heartbeats meet at the start, the client drops all but one, at times the wrong ones.
        consumer.setHeartbeatBrokerInterval(number("heartbeat-interval", 30_000));
        return consumer;
    }

    private DefaultMQAdminExt startAdmin() throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(signing(), 10_000);
        admin.setNamesrvAddr(text("namesrv"));
        admin.setInstanceName(text("instance", "driver"));
        admin.setClientIP(text("client-ip", "127.0.0.1"));
        admin.start();
        return admin;
    }

    private DefaultMQPullConsumer startPuller() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(
            text("group", "driver-pull"), signing());
        consumer.setNamesrvAddr(text("namesrv"));
        consumer.setInstanceName(text("instance", "driver"));
        consumer.setClientIP(text("client-ip", "127.0.0.1"));
        consumer.start();
        return consumer;
    }

    private Message message(int i) {
        StringBuilder body = new StringBuilder(text("prefix", "body-") + i);
        for (int size = number("size", 0); body.length() < size; ) {
            body.append(" and on ").append(body.length());
        }
        Message message =
            new Message(text("topic"), body.toString().getBytes(StandardCharsets.UTF_8));
        if (options.containsKey("tag")) {
            String[] tags = text("tag").split(",");
            message.setTags(tags[i % tags.length]);
        }
        if (options.containsKey("keys")) {
            message.setKeys(text("keys") + i);
        }
        if (options.containsKey("delay")) {
            message.setDelayTimeLevel(number("delay", 0));
        }
        if (options.containsKey("timer-ms")) {
            MessageAccessor.putProperty(message, "TIMER_DELAY_MS", text("timer-ms"));
        }
        if (options.containsKey("ordered")) {
            message.putUserProperty("order", "order-" + i % number("ordered", 1));
        }
        if (options.containsKey("hash")) {
            String[] keys = text("hash").split(",");
            message.putUserProperty("hash", keys[i % keys.length]);
        }
        if (options.containsKey("property")) {
            for (String property : text("property").split(",")) {
                int at = property.indexOf(':');
                message.putUserProperty(property.substring(0, at), property.substring(at + 1));
            }
            message.putUserProperty("number", String.valueOf(i));
        }
        return message;
    }

    private static Map<String, Object> sent(SendResult result) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("status", result.getSendStatus().name());
        line.put("msgId", result.getMsgId());
        line.put("offsetMsgId", result.getOffsetMsgId());
        line.put("queueId", result.getMessageQueue().getQueueId());
        line.put("queueOffset", result.getQueueOffset());
        return line;
    }

    private static Map<String, Object> refusal(Throwable refused) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("refused", String.valueOf(refused));
        return line;
    }

    private static Map<String, Object> received(MessageExt message) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", message.getTopic());
        line.put("queueId", message.getQueueId());
        line.put("queueOffset", message.getQueueOffset());
        line.put("commitLogOffset", message.getCommitLogOffset());
        line.put("msgId", message.getMsgId());
        line.put("bornTimestamp", message.getBornTimestamp());
        line.put("storeTimestamp", message.getStoreTimestamp());
        line.put("bornHost", host(message.getBornHost()));
        line.put("storeHost", host(message.getStoreHost()));
        line.put("sysFlag", message.getSysFlag());
        line.put("flag", message.getFlag());
        line.put("reconsumeTimes", message.getReconsumeTimes());
        line.put("properties", new TreeMap<>(message.getProperties()));
        // The client's decoder leaves an empty body out.
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        line.put("body", Base64.getEncoder().encodeToString(body));
        return line;
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        return host.getAddress().getHostAddress() + ":" + host.getPort();
    }

    private String text(String name) {
        String value = options.get(name);
        if (value == null) {
            throw new IllegalArgumentException("missing " + name + "=");
        }
        return value;
    }

    private String text(String name, String otherwise) {
        return options.getOrDefault(name, otherwise);
    }

    private int number(String name, int otherwise) {
        return Integer.parseInt(text(name, String.valueOf(otherwise)));
    }

    void print(Map<String, Object> line) {
        Map<String, Object> printed = new LinkedHashMap<>();
        if (number != null) {
            printed.put("command", number);
        }
        printed.putAll(line);
        synchronized (OUT) {
            OUT.println(json(printed));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        if (value instanceof Map) {
            StringBuilder text = new StringBuilder("{");
            ((Map<?, ?>) value).forEach((name, each) -> {
                if (text.length() > 1) {
                    text.append(',');
                }
                text.append(json(String.valueOf(name))).append(':').append(json(each));
            });
            return text.append('}').toString();
        }
        if (value == null || value instanceof Number || value instanceof Boolean) {
            return String.valueOf(value);
        }
        StringBuilder text = new StringBuilder("\"");
        for (char c : String.valueOf(value).toCharArray()) {
            if (c == '"' || c == '\\' || c < 0x20 || c > 0x7e) {
                text.append(String.format("\\u%04x", (int) c));
            } else {
                text.append(c);
            }
        }
        return text.append('"').toString();
    }
}
