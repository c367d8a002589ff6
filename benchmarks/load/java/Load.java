import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;

/**
 * Apache's client under load: reads wishes from standard input, words {@code name=value} a line, and
 * answers each with one line of JSON.
 */
public final class Load {
    private static final int DEADLINE = 60;
    private static final PrintStream OUT = System.out;
    private static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    private static DefaultMQProducer producer;

    private Load() { }

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        BufferedReader wishes =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = wishes.readLine(); line != null; line = wishes.readLine()) {
            Map<String, String> wish = new HashMap<>();
            for (String word : line.split(" ")) {
                int at = word.indexOf('=');
                wish.put(word.substring(0, at), word.substring(at + 1));
            }
            String told;
            try {
                told = wish.get("type").equals("Send") ? send(wish) : consume(wish);
            } catch (Exception e) {
                String reason = e.toString().replaceAll("[^ -!#-\\[\\]-~]", " ");
                told = "{\"type\":\"Failed\",\"reason\":\"" + reason + "\"}";
            }
            OUT.println("@" + told);
            OUT.flush();
        }
        System.exit(0); // the client's own threads would keep the process alive
    }

    private static String send(Map<String, String> wish) throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer("bench-java");
            producer.setNamesrvAddr(wish.get("name_server"));
            producer.setSendMsgTimeout(10_000);
            producer.start();
        }
        int threads = Integer.parseInt(wish.get("threads"));
        int each = Integer.parseInt(wish.get("count")) / threads;
        byte[][] bodies = new byte[1024][];
        for (int i = 0; i < bodies.length; i++) {
            bodies[i] = String.format("%08d%1016s", i, "").getBytes(StandardCharsets.UTF_8);
        }
        AtomicReference<Exception> failure = new AtomicReference<>();
        CyclicBarrier ready = new CyclicBarrier(threads + 1);
        CountDownLatch ended = new CountDownLatch(threads);
        for (int thread = 0; thread < threads; thread++) {
            new Thread(() -> {
                try {
                    ready.await();
                    for (int i = 0; i < each; i++) {
                        producer.send(new Message(
                            wish.get("topic"), "paid", "order-" + i, bodies[i % bodies.length]));
                    }
                } catch (Exception e) {
                    failure.set(e);
                }
                ended.countDown();
            }).start();
        }
        producer.send(new Message(wish.get("topic"), "paid", "first", bodies[0]));
        ready.await();
        double began = now();
        double cpu = cpu();
        if (!ended.await(DEADLINE, TimeUnit.SECONDS)) {
            throw new IllegalStateException("the sends did not end");
        }
        if (failure.get() != null) {
            throw failure.get();
        }
        return spent(each * threads, began, cpu);
    }

    private static String consume(Map<String, String> wish) throws Exception {
        int count = Integer.parseInt(wish.get("count"));
        AtomicInteger had = new AtomicInteger();
        AtomicReference<double[]> first = new AtomicReference<>();
        AtomicReference<String> told = new AtomicReference<>();
        CountDownLatch ended = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(wish.get("group"));
        consumer.setNamesrvAddr(wish.get("name_server"));
        consumer.setInstanceName(wish.get("group"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(20);
        consumer.setConsumeThreadMax(20);
        consumer.subscribe(wish.get("topic"), "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            int number = had.addAndGet(messages.size());
            if (number == 1) {
                first.set(new double[] {now(), cpu()});
            } else if (number == count) {
                told.set(spent(count - 1, first.get()[0], first.get()[1]));
                ended.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean isComplete = ended.await(DEADLINE, TimeUnit.SECONDS);
        consumer.shutdown();
        if (!isComplete) {
            throw new IllegalStateException(had + " of " + count + " messages came");
        }
        return told.get();
    }

    private static String spent(int messages, double began, double cpu) {
        double ended = now();
        return String.format(
            java.util.Locale.ROOT,
            "{\"type\":\"Spent\",\"messages\":%d,\"began\":%.9f,\"ended\":%.9f,\"cpu\":%.9f}",
            messages, began, ended, cpu() - cpu);
    }

    /** On Linux the clock that Python calls monotonic. */
    private static double now() {
        return System.nanoTime() / 1e9;
    }

    private static double cpu() {
        return SYSTEM.getProcessCpuTime() / 1e9;
    }
}
